// Instructions that compute a lane's result from that lane's operands.
#include <immintrin.h>

#include "machine.h"

#define STORE(TD, E)                                \
  TD* d = ROW(TD, 0);                               \
  if (m == ALL) {                                   \
    IVDEP EACH { d[l] = (TD)(E); }                  \
  } else {                                          \
    IVDEP EACH {                                    \
      TD r = (TD)(E);                               \
      d[l] = ON(m, l) ? r : d[l];                   \
    }                                               \
  }
#define OP1(name, TD, TA, E)       \
  OP(name) {                       \
    const TA* a_ = ROW(TA, 1);     \
    STORE(TD, ({ TA a = a_[l]; E; })) \
  }
#define OP2(name, TD, TA, TB, E)                         \
  OP(name) {                                             \
    const TA* a_ = ROW(TA, 1);                           \
    const TB* b_ = ROW(TB, 2);                           \
    STORE(TD, ({ TA a = a_[l]; TB b = b_[l]; E; }))      \
  }
#define OP3(name, TD, TA, TB, TC, E)                                   \
  OP(name) {                                                           \
    const TA* a_ = ROW(TA, 1);                                         \
    const TB* b_ = ROW(TB, 2);                                         \
    const TC* c_ = ROW(TC, 3);                                         \
    STORE(TD, ({ TA a = a_[l]; TB b = b_[l]; TC c = c_[l]; E; }))      \
  }

// --- integers ---
#define INTEGER(U, S, u, s, bits)                                                                            \
  OP2(add_##u, U, U, U, a + b)                                                                               \
  OP2(sub_##u, U, U, U, a - b)                                                                               \
  OP2(mul_lo_##u, U, U, U, (U)((u64)a * b))                                                                  \
  OP3(mad_lo_##u, U, U, U, U, (U)((u64)a * b + c))                                                           \
  OP2(and_##u, U, U, U, a & b)                                                                               \
  OP2(or_##u, U, U, U, a | b)                                                                                \
  OP2(xor_##u, U, U, U, a ^ b)                                                                               \
  OP1(not_##u, U, U, ~a)                                                                                     \
  OP1(neg_##s, U, U, (U)(0 - a))                                                                             \
  OP1(abs_##s, U, S, a < 0 ? (U)(0 - (U)a) : (U)a)                                                           \
  OP2(shl_##u, U, U, u32, b < bits ? (U)(a << b) : 0)                                                        \
  OP2(shr_##u, U, U, u32, b < bits ? (U)(a >> b) : 0)                                                        \
  OP2(shr_##s, S, S, u32, a >> (b < bits ? b : bits - 1))                                                    \
  OP2(min_##u, U, U, U, a < b ? a : b)                                                                       \
  OP2(max_##u, U, U, U, a > b ? a : b)                                                                       \
  OP2(min_##s, S, S, S, a < b ? a : b)                                                                       \
  OP2(max_##s, S, S, S, a > b ? a : b)                                                                       \
  OP2(div_##u, U, U, U, b ? a / b : (U) ~(U)0)                                                               \
  OP2(rem_##u, U, U, U, b ? a % b : a)                                                                       \
  OP2(div_##s, S, S, S, b == 0 ? -1 : b == -1 ? (S)(0 - (U)a) : a / b)                                       \
  OP2(rem_##s, S, S, S, b == 0 ? a : b == -1 ? 0 : a % b)                                                    \
  OP1(mov_##u, U, U, a)
INTEGER(u16, s16, u16, s16, 16)
INTEGER(u32, s32, u32, s32, 32)
INTEGER(u64, s64, u64, s64, 64)
OP2(mul_wide_u16, u32, u16, u16, (u32)a * b)
OP2(mul_wide_s16, s32, s16, s16, (s32)a * b)
OP2(mul_wide_u32, u64, u32, u32, (u64)a * b)
OP2(mul_wide_s32, s64, s32, s32, (s64)a * b)
OP3(mad_wide_u32, u64, u32, u32, u64, (u64)a * b + c)
OP3(mad_wide_s32, s64, s32, s32, s64, (s64)((u64)((s64)a * b) + (u64)c))
OP2(mul_hi_u32, u32, u32, u32, (u64)a * b >> 32)
OP2(mul_hi_s32, s32, s32, s32, (s64)a * b >> 32)
OP2(mul_hi_u64, u64, u64, u64, (u64)((unsigned __int128)a * b >> 64))
OP2(mul_hi_s64, s64, s64, s64, (s64)((__int128)a * b >> 64))
OP3(mad_hi_u32, u32, u32, u32, u32, ((u64)a * b >> 32) + c)
OP1(popc_b32, u32, u32, __builtin_popcount(a))
OP1(popc_b64, u32, u64, __builtin_popcountll(a))
OP1(clz_b32, u32, u32, a ? __builtin_clz(a) : 32)
OP1(clz_b64, u32, u64, a ? __builtin_clzll(a) : 64)
static u32 reversed(u32 x) {
  u32 y = 0;
  for (int k = 0; k < 32; ++k) y |= (x >> k & 1) << (31 - k);
  return y;
}
OP1(brev_b32, u32, u32, reversed(a))
OP1(bfind_u32, u32, u32, a ? 31 - __builtin_clz(a) : ALL)
OP1(bfind_shiftamt_u32, u32, u32, a ? __builtin_clz(a) : ALL)
OP(bfi_b32) {
  const u32 *a = ROW(u32, 1), *b = ROW(u32, 2), *c = ROW(u32, 3), *n = ROW(u32, 4);
  STORE(u32, ({
          u32 from = c[l] & 255, count = n[l] & 255;
          u64 field = from >= 32 ? 0 : ((count >= 32 ? ALL : (1ull << count) - 1) << from) & ALL;
          (u32)((b[l] & ~field) | (((u64)a[l] << (from & 63)) & field));
        }))
}
OP(bfi_b64) {
  const u64 *a = ROW(u64, 1), *b = ROW(u64, 2);
  const u32 *c = ROW(u32, 3), *n = ROW(u32, 4);
  STORE(u64, ({
          u32 from = c[l] & 255, count = n[l] & 255;
          u64 field = from >= 64 ? 0 : (count >= 64 ? ~0ull : (1ull << count) - 1) << from;
          (b[l] & ~field) | ((from >= 64 ? 0 : a[l] << from) & field);
        }))
}
OP3(bfe_u32, u32, u32, u32, u32, ({
      u32 from = b & 255, count = c & 255;
      from >= 32 || !count ? 0 : (a >> from) & (count >= 32 ? ALL : (1u << count) - 1);
    }))
static u32 permuted(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 y = 0;
  for (int k = 0; k < 4; ++k) {
    u32 s = selector >> 4 * k & 15, byte = bytes >> 8 * (s & 7) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    y |= byte << 8 * k;
  }
  return y;
}
OP3(prmt_b32, u32, u32, u32, u32, permuted(a, b, c))
OP(lop3_b32) {
  const u32 *a = ROW(u32, 1), *b = ROW(u32, 2), *c = ROW(u32, 3);
  const u32 table = ROW(u32, 4)[0];
  STORE(u32, ({
          u32 y = 0;
          for (int k = 0; k < 8; ++k)
            if (table >> k & 1) y |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
          y;
        }))
}
OP3(shf_l_wrap_b32, u32, u32, u32, u32, (u32)(((u64)b << 32 | a) << (c & 31) >> 32))
OP3(shf_r_wrap_b32, u32, u32, u32, u32, (u32)(((u64)b << 32 | a) >> (c & 31)))
OP3(shf_l_clamp_b32, u32, u32, u32, u32, c >= 32 ? a : (u32)(((u64)b << 32 | a) << c >> 32))
OP3(shf_r_clamp_b32, u32, u32, u32, u32, c >= 32 ? b : (u32)(((u64)b << 32 | a) >> c))

// Between widths. `aux`: what is read and what it is widened to, as u8 s8 u16 s16 u32 s32 u64 s64; `imm`: the rows' bits.
static u64 as_type(u64 x, int type) {
  switch (type) {
    case 0: return (u8)x;
    case 1: return (u64)(s64)(s8)x;
    case 2: return (u16)x;
    case 3: return (u64)(s64)(s16)x;
    case 4: return (u32)x;
    case 5: return (u64)(s64)(s32)x;
    default: return x;
  }
}
OP(cvt_integer) {
  const int from = i->aux & 15, to = i->aux >> 4, bits_to = i->imm & 255, bits_from = i->imm >> 8;
  EACH if (ON(m, l)) {
    u64 x = bits_from == 16 ? ROW(u16, 1)[l] : bits_from == 32 ? ROW(u32, 1)[l] : ROW(u64, 1)[l];
    x = as_type(as_type(x, from), to);
    if (bits_to == 16) ROW(u16, 0)[l] = x;
    if (bits_to == 32) ROW(u32, 0)[l] = x;
    if (bits_to == 64) ROW(u64, 0)[l] = x;
  }
}
OP1(cvt_s64_s32, s64, s32, (s64)a)
OP1(cvt_u64_u32, u64, u32, (u64)a)
OP1(cvt_u32_u64, u32, u64, (u32)a)

// --- predicates ---
#define SETPRED(value)                                \
  {                                                   \
    u32 v_ = (value);                                 \
    PRED(0) = (PRED(0) & ~m) | (v_ & m);              \
  }
OP(mov_pred) SETPRED(PRED(1))
OP(not_pred) SETPRED(~PRED(1))
OP(and_pred) SETPRED(PRED(1) & PRED(2))
OP(or_pred) SETPRED(PRED(1) | PRED(2))
OP(xor_pred) SETPRED(PRED(1) ^ PRED(2))
#define COMPARE(name, T, E)                         \
  OP(setp_##name) {                                 \
    const T *a_ = ROW(T, 1), *b_ = ROW(T, 2);       \
    u32 r[LANES], y = 0;                            \
    EACH {                                          \
      T a = a_[l], b = b_[l];                       \
      r[l] = (E);                                   \
    }                                               \
    EACH y |= r[l] << l;                            \
    SETPRED(y)                                      \
  }
#define COMPARES(T, t)             \
  COMPARE(eq_##t, T, a == b)       \
  COMPARE(ne_##t, T, a != b)       \
  COMPARE(lt_##t, T, a < b)        \
  COMPARE(le_##t, T, a <= b)       \
  COMPARE(gt_##t, T, a > b)        \
  COMPARE(ge_##t, T, a >= b)
COMPARES(u16, u16)
COMPARES(s16, s16)
COMPARES(u32, u32)
COMPARES(s32, s32)
COMPARES(u64, u64)
COMPARES(s64, s64)
#define FLOAT_COMPARES(T, t)                                  \
  COMPARE(eq_##t, T, a == b)                                  \
  COMPARE(ne_##t, T, a < b || a > b)                          \
  COMPARE(lt_##t, T, a < b)                                   \
  COMPARE(le_##t, T, a <= b)                                  \
  COMPARE(gt_##t, T, a > b)                                   \
  COMPARE(ge_##t, T, a >= b)                                  \
  COMPARE(equ_##t, T, !(a < b || a > b))                      \
  COMPARE(neu_##t, T, a != b)                                 \
  COMPARE(ltu_##t, T, !(a >= b))                              \
  COMPARE(leu_##t, T, !(a > b))                               \
  COMPARE(gtu_##t, T, !(a <= b))                              \
  COMPARE(geu_##t, T, !(a < b))                               \
  COMPARE(num_##t, T, a == a && b == b)                       \
  COMPARE(nan_##t, T, a != a || b != b)
FLOAT_COMPARES(f32, f32)
FLOAT_COMPARES(f64, f64)
#define SELECT(T, t)                                        \
  OP(selp_##t) {                                            \
    const T *a = ROW(T, 1), *b = ROW(T, 2);                 \
    const u32 p = PRED(3);                                  \
    STORE(T, ON(p, l) ? a[l] : b[l])                        \
  }
SELECT(u16, u16)
SELECT(u32, u32)
SELECT(u64, u64)

// --- float32; denormal numbers are flushed by the processor's own mode ---
#define C(x) canonical(x)
OP2(add_f32, f32, f32, f32, C(a + b))
OP2(sub_f32, f32, f32, f32, C(a - b))
OP2(mul_f32, f32, f32, f32, C(a * b))
OP3(fma_f32, f32, f32, f32, f32, C(__builtin_fmaf(a, b, c)))
OP2(div_f32, f32, f32, f32, C(a / b))
OP1(rcp_f32, f32, f32, C(1.f / a))
OP1(sqrt_f32, f32, f32, C(sqrtf(a)))
OP1(rsqrt_f32, f32, f32, C(1.f / sqrtf(a)))
OP1(neg_f32, f32, f32, a != a ? float_of(0x7fffffffu) : -a)
OP1(abs_f32, f32, f32, a != a ? float_of(0x7fffffffu) : fabsf(a))
OP1(tanh_f32, f32, f32, C(tanhf(a)))
OP1(lg2_f32, f32, f32, C(log2f(a)))
OP1(cos_f32, f32, f32, C(cosf(a)))
OP1(sin_f32, f32, f32, C(sinf(a)))
static inline f32 power_of_two(f32 x) {
  f32 y = x < -160.f ? -160.f : x > 160.f ? 160.f : x;
  f32 whole = __builtin_rintf(y), f = y - whole;
  f32 p = 1.5252734e-5f;
  p = __builtin_fmaf(p, f, 1.5403530e-4f);
  p = __builtin_fmaf(p, f, 1.3333558e-3f);
  p = __builtin_fmaf(p, f, 9.6181291e-3f);
  p = __builtin_fmaf(p, f, 5.5504109e-2f);
  p = __builtin_fmaf(p, f, 2.4022651e-1f);
  p = __builtin_fmaf(p, f, 6.9314718e-1f);
  p = __builtin_fmaf(p, f, 1.f);
  s32 n = (s32)whole, half = n / 2, rest = n - half;
  f32 r = p * float_of((u32)(half + 127) << 23) * float_of((u32)(rest + 127) << 23);
  return x != x ? float_of(0x7fffffffu) : r;
}
OP1(ex2_f32, f32, f32, power_of_two(a))
static inline f32 smaller(f32 a, f32 b) {
  f32 equal = float_of(bits_of(a) | bits_of(b));
  return a != a ? b : b != b ? a : a < b ? a : a == b ? equal : b;
}
static inline f32 larger(f32 a, f32 b) {
  f32 equal = float_of(bits_of(a) & bits_of(b));
  return a != a ? b : b != b ? a : a > b ? a : a == b ? equal : b;
}
OP2(min_f32, f32, f32, f32, C(smaller(a, b)))
OP2(max_f32, f32, f32, f32, C(larger(a, b)))
OP2(min_NaN_f32, f32, f32, f32, a != a || b != b ? float_of(0x7fffffffu) : smaller(a, b))
OP2(max_NaN_f32, f32, f32, f32, a != a || b != b ? float_of(0x7fffffffu) : larger(a, b))
OP(add_rz_f32) {
  const f32 *a = ROW(f32, 1), *b = ROW(f32, 2);
  f32* d = ROW(f32, 0);
  const u32 before = _mm_getcsr();
  _mm_setcsr(before | 0x6000);
  EACH if (ON(m, l)) {
    volatile f32 x = a[l], y = b[l];
    volatile f32 sum = x + y;
    d[l] = sum;
  }
  _mm_setcsr(before);
  EACH if (ON(m, l)) d[l] = C(d[l]);
}

// --- float64 ---
OP2(add_f64, f64, f64, f64, a + b)
OP2(sub_f64, f64, f64, f64, a - b)
OP2(mul_f64, f64, f64, f64, a * b)
OP2(div_f64, f64, f64, f64, a / b)
OP3(fma_f64, f64, f64, f64, f64, fma(a, b, c))
OP1(neg_f64, f64, f64, -a)
OP1(abs_f64, f64, f64, fabs(a))
OP1(rsqrt_f64, f64, f64, 1. / sqrt(a))
OP1(sqrt_f64, f64, f64, sqrt(a))
OP2(max_f64, f64, f64, f64, fmax(a, b))
OP2(min_f64, f64, f64, f64, fmin(a, b))

// --- conversions of floats ---
#define TO_INTEGER(name, T, lowest, above, of_nan, HOW) \
  OP1(name, T, f32, a != a ? (T)of_nan : HOW(a) < (f32)lowest ? (T)lowest : HOW(a) >= above ? (T)(~(T)0 ^ (T)lowest) : (T)HOW(a))
#define AS_IS(x) (x)
#define TO_INTEGERS(how, HOW)                                                                   \
  TO_INTEGER(cvt_##how##_s32_f32, s32, INT32_MIN, 2147483648.f, 0, HOW)                         \
  TO_INTEGER(cvt_##how##_s64_f32, s64, INT64_MIN, 9223372036854775808.f, INT64_MIN, HOW)        \
  OP1(cvt_##how##_u32_f32, u32, f32, a != a || HOW(a) < 0 ? 0 : HOW(a) >= 4294967296.f ? ALL : (u32)HOW(a))
TO_INTEGERS(rzi, AS_IS)
TO_INTEGERS(rni, rintf)
TO_INTEGERS(rmi, floorf)
TO_INTEGERS(rpi, ceilf)
OP1(cvt_rmi_f32_f32, f32, f32, C(floorf(a)))
OP1(cvt_rpi_f32_f32, f32, f32, C(ceilf(a)))
OP1(cvt_rni_f32_f32, f32, f32, C(rintf(a)))
OP1(cvt_rzi_f32_f32, f32, f32, C(truncf(a)))
OP1(cvt_rn_f32_s32, f32, s32, (f32)a)
OP1(cvt_rn_f32_u32, f32, u32, (f32)a)
OP1(cvt_rn_f32_s64, f32, s64, (f32)a)
OP1(cvt_rn_f32_u64, f32, u64, (f32)a)
OP1(cvt_rn_f32_u16, f32, u16, (f32)a)
OP1(cvt_rn_f32_s16, f32, s16, (f32)a)
OP1(cvt_rn_f64_s32, f64, s32, (f64)a)
OP1(cvt_rn_f64_u32, f64, u32, (f64)a)
OP1(cvt_rn_f64_s64, f64, s64, (f64)a)
OP1(cvt_f64_f32, f64, f32, (f64)a)
OP1(cvt_rn_f32_f64, f32, f64, C((f32)a))

u16 to_bf16(f32 x) {
  const u32 b = bits_of(x);
  if (x != x) return 0x7fff;
  return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
f32 from_f16(u16 b) { return _cvtsh_ss(b); }
// Rounded once: a float32 in between keeps what was cut off in its last bit.
u16 to_f16(f64 x) {
  if (x != x) return 0x7fff;
  f32 f = (f32)x;
  if (!isinf(f) && (f64)f != x) {
    if (fabs((f64)f) > fabs(x)) f = float_of(bits_of(f) - 1);
    f = float_of(bits_of(f) | 1);
  }
  return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
}
u8 to_e4m3(f32 x) {
  if (x != x) return 0x7f;
  const u8 sign = signbit(x) ? 0x80 : 0;
  f64 y = fabs((f64)x);
  if (y >= 448) return sign | 0x7e;
  int exponent;
  if (y == 0) return sign;
  frexp(y, &exponent);  // y = f 2^exponent, f in [0.5, 1)
  exponent -= 1;
  if (exponent < -6) exponent = -6;
  const f64 steps = rint(ldexp(y, 3 - exponent));  // of 2^(exponent - 3)
  const int n = (int)steps;
  // n in [0, 16]; 16 carries into the exponent, and subnormal numbers are those of the lowest exponent below 8
  const int code = (exponent + 6) * 8 + n;
  return sign | (code > 0x7e ? 0x7e : code);
}
f32 from_e4m3(u8 x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if (exponent == 15 && mantissa == 7) return float_of(0x7fffffffu);
  const f32 y = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return x & 0x80 ? -y : y;
}
OP1(cvt_f32_f16, f32, u16, a > 0x7c00 && (a & 0x7fff) > 0x7c00 ? float_of(0x7fffffffu) : C(from_f16(a)))
OP1(cvt_rn_f16_f32, u16, f32, to_f16(a))
OP1(cvt_rn_bf16_f32, u16, f32, to_bf16(a))
OP1(cvt_f32_bf16, f32, u16, C(from_bf16(a)))
OP2(cvt_rn_bf16x2_f32, u32, f32, f32, (u32)to_bf16(a) << 16 | to_bf16(b))
OP2(cvt_rn_f16x2_f32, u32, f32, f32, (u32)to_f16(a) << 16 | to_f16(b))
OP2(cvt_rn_satfinite_e4m3x2_f32, u16, f32, f32, (u32)to_e4m3(a) << 8 | to_e4m3(b))

// --- pairs of float16 ---
#define HALVES(E)                                  \
  ({                                               \
    u32 y_ = 0;                                    \
    for (int h = 0; h < 32; h += 16) {             \
      u16 y;                                       \
      E;                                           \
      y_ |= (u32)y << h;                           \
    }                                              \
    y_;                                            \
  })
#define A from_f16(a >> h)
#define B from_f16(b >> h)
OP3(fma_rn_f16x2, u32, u32, u32, u32, HALVES(y = to_f16((f64)A * B + from_f16(c >> h))))
OP2(mul_rn_f16x2, u32, u32, u32, HALVES(y = to_f16((f64)A * B)))
OP2(add_rn_f16x2, u32, u32, u32, HALVES(y = to_f16((f64)A + B)))
OP2(sub_rn_f16x2, u32, u32, u32, HALVES(y = to_f16((f64)A - B)))
OP1(neg_f16x2, u32, u32, a ^ 0x80008000u)
OP1(abs_f16x2, u32, u32, a & 0x7fff7fffu)
OP2(min_f16x2, u32, u32, u32, HALVES(y = to_f16(smaller(A, B))))
OP2(max_f16x2, u32, u32, u32, HALVES(y = to_f16(larger(A, B))))
OP2(max_NaN_f16x2, u32, u32, u32, HALVES(f32 p = A; f32 q = B; y = p != p || q != q ? 0x7fff : to_f16(larger(p, q))))
OP2(min_NaN_f16x2, u32, u32, u32, HALVES(f32 p = A; f32 q = B; y = p != p || q != q ? 0x7fff : to_f16(smaller(p, q))))

// --- putting together and taking apart ---
OP2(pack_b32, u32, u16, u16, (u32)b << 16 | a)
OP2(pack_b64, u64, u32, u32, (u64)b << 32 | a)
OP(pack4_b64) {
  const u16 *a = ROW(u16, 1), *b = ROW(u16, 2), *c = ROW(u16, 3), *e = ROW(u16, 4);
  STORE(u64, (u64)e[l] << 48 | (u64)c[l] << 32 | (u64)b[l] << 16 | a[l])
}
OP(unpack_b32) {
  const u32* a = ROW(u32, 2);
  EACH if (ON(m, l)) {
    u32 x = a[l];
    ROW(u16, 0)[l] = x, ROW(u16, 1)[l] = x >> 16;
  }
}
OP(unpack_b64) {
  const u64* a = ROW(u64, 2);
  EACH if (ON(m, l)) {
    u64 x = a[l];
    ROW(u32, 0)[l] = x, ROW(u32, 1)[l] = x >> 32;
  }
}
