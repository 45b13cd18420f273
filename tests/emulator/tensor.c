// Instructions of a whole warp on tiles: mma, ldmatrix, wgmma; and those that exchange values between lanes.
#include <immintrin.h>

#include "machine.h"

typedef f32 (*FromHalf)(u16);
static f32 bf16_value(u16 b) { return from_bf16(b); }
static f32 f16_value(u16 b) { return from_f16(b); }

// d[16][8] += a[16][k] b[k][8]
static void multiply(f32* d, const f32* a, const f32* b, int k) {
  for (int r = 0; r < 16; ++r)
    for (int x = 0; x < k; ++x) {
      const f32 y = a[r * k + x];
      IVDEP for (int c = 0; c < 8; ++c) d[r * 8 + c] += y * b[x * 8 + c];
    }
}
static void mma_k16(Warp* w, const Ins* i, FromHalf value) {  // rows: d 0-3, a 4-7, b 8-9, c 10-13
  f32 a[16 * 16], b[16 * 8], d[16 * 8];
  EACH {
    const int g = l / 4, t = l % 4 * 2;
    for (int e = 0; e < 4; ++e) {
      const u32 x = ROW(u32, 4 + e)[l];
      f32* to = a + (g + e % 2 * 8) * 16 + t + e / 2 * 8;
      to[0] = value(x), to[1] = value(x >> 16);
    }
    for (int e = 0; e < 2; ++e) {
      const u32 x = ROW(u32, 8 + e)[l];
      b[(t + e * 8) * 8 + g] = value(x), b[(t + e * 8 + 1) * 8 + g] = value(x >> 16);
    }
    for (int e = 0; e < 4; ++e) d[(g + e / 2 * 8) * 8 + t + e % 2] = ROW(f32, 10 + e)[l];
  }
  multiply(d, a, b, 16);
  EACH for (int e = 0; e < 4; ++e) ROW(f32, e)[l] = canonical(d[(l / 4 + e / 2 * 8) * 8 + l % 4 * 2 + e % 2]);
}
OP(mma_m16n8k16_f32_f16_f16_f32) { mma_k16(w, i, f16_value); }
OP(mma_m16n8k16_f32_bf16_bf16_f32) { mma_k16(w, i, bf16_value); }
OP(mma_m16n8k32_s32_s8_s8_s32) {
  s32 a[16][32], b[32][8], d[16][8];
  EACH {
    const int g = l / 4, t = l % 4 * 4;
    for (int byte = 0; byte < 4; ++byte) {
      for (int e = 0; e < 4; ++e) a[g + e % 2 * 8][t + e / 2 * 16 + byte] = (int8_t)(ROW(u32, 4 + e)[l] >> byte * 8);
      for (int e = 0; e < 2; ++e) b[t + e * 16 + byte][g] = (int8_t)(ROW(u32, 8 + e)[l] >> byte * 8);
    }
    for (int e = 0; e < 4; ++e) d[g + e / 2 * 8][l % 4 * 2 + e % 2] = ROW(s32, 10 + e)[l];
  }
  for (int r = 0; r < 16; ++r)
    for (int x = 0; x < 32; ++x)
      IVDEP for (int c = 0; c < 8; ++c) d[r][c] = (s32)((u32)d[r][c] + (u32)(a[r][x] * b[x][c]));
  EACH for (int e = 0; e < 4; ++e) ROW(s32, e)[l] = d[l / 4 + e / 2 * 8][l % 4 * 2 + e % 2];
}

// Rows: n results, then the address.
static void ldmatrix(Warp* w, const Ins* i, int transposed) {
  const int n = i->n;
  u16 tile[4][8][8];
  for (int x = 0; x < n; ++x)
    for (int r = 0; r < 8; ++r) {
      const u32 address = ROW(u32, n)[x * 8 + r] + (u32)i->imm;
      if (address % 16) fail("ldmatrix of a row at %u", address);
      memcpy(tile[x][r], shared_at(w, address, 16), 16);
    }
  for (int x = 0; x < n; ++x) EACH {
      const int r = l / 4, c = l % 4 * 2;
      ROW(u32, x)[l] = transposed ? tile[x][c][r] | (u32)tile[x][c + 1][r] << 16 : tile[x][r][c] | (u32)tile[x][r][c + 1] << 16;
    }
}
OP(ldmatrix) { ldmatrix(w, i, 0); }
OP(ldmatrix_trans) { ldmatrix(w, i, 1); }

// --- wgmma: each warp computes its 16 rows of 64 when the instruction is issued ---
static u32 swizzled(u32 address, u64 descriptor) {
  switch (descriptor >> 62) {
    case 0: return address;
    case 1: return address ^ (address >> 7 & 7) << 4;
    case 2: return address ^ (address >> 7 & 3) << 4;
    default: return address ^ (address >> 7 & 1) << 4;
  }
}
// 16 bytes of an operand: elements k .. of a row, or, transposed, rows .. of one k.
static const u8* chunk_at(Warp* w, u64 descriptor, u32 row, u32 k, u32 element_bytes, int transposed) {
  const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
            stride = (descriptor >> 32 & 0x3fff) << 4, swizzle = descriptor >> 62;
  if (swizzle == 0 || (transposed && swizzle != 1) || descriptor >> 49 & 7)
    fail("wgmma: a descriptor 0x%llx, of a kind that is not known here", (unsigned long long)descriptor);
  const u32 row_bytes = 256 >> swizzle;  // 128, 64 or 32
  if (!transposed && k * element_bytes >= row_bytes) fail("wgmma: k past the end of a row");
  const u32 offset = transposed ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                                : row / 8 * stride + row % 8 * row_bytes + k * element_bytes;
  return shared_at(w, swizzled(start + offset, descriptor), 16);
}
// Of what an instruction reads, which nobody may write before its group has been waited for.
static u64 digest(Warp* w, const Reading* x) {
  u64 y = 0;
  for (u32 r = 0; r < x->rows; r += x->transposed ? 8 : 1)
    for (u32 k = 0; k < x->k; k += x->transposed ? 1 : 16 / x->bytes) {
      u64 parts[2];
      memcpy(parts, chunk_at(w, x->descriptor, x->first + r, k, x->bytes, x->transposed), 16);
      y = (y ^ parts[0]) * 0x9e3779b97f4a7c15ull, y = (y ^ parts[1] ^ y >> 29) * 0xbf58476d1ce4e5b9ull;
    }
  return y;
}
static void note_reading(Warp* w, Reading x) {
  if (w->reading_count == MOST_READINGS) fail("wgmma: more than %d instructions are under way", MOST_READINGS);
  x.digest = digest(w, &x), x.group = w->wgmma_groups;
  w->readings[w->reading_count++] = x;
}
OP(wgmma_commit_group) { w->wgmma_groups += 1; }
// An instruction is of four warps, and done for all of them once one has waited for it: that warp may tell others so.
OP(wgmma_wait_group) {
  const u32 done = w->wgmma_groups > (u32)i->imm ? w->wgmma_groups - (u32)i->imm : 0;
  Warp* four = w->block->warps + w->index / 4 * 4;
  for (int n = 0; n < 4; ++n) {
    if (four[n].wgmma_groups >= done) continue;
    if (four[n].done) fail("wgmma: warp %d waits for a group that warp %d has not closed", w->index, four[n].index);
    w->yields = 1;  // the scheduler comes back to the same instruction
    return;
  }
  for (int n = 0; n < 4; ++n) {
    int kept = 0;
    for (int k = 0; k < four[n].reading_count; ++k) {
      const Reading* x = four[n].readings + k;
      if (x->group >= done) four[n].readings[kept++] = *x;
      else if (digest(four + n, x) != x->digest)
        fail("shared memory that wgmma reads was written before it was waited for");
    }
    four[n].reading_count = kept;
  }
}
#define MOST_COLUMNS 256
static f32 e4m3_values[256];
static int e4m3_known;
// to[k][row], or with `by_rows` to[row][k], of an operand of so many rows.
static void decode(Warp* w, f32* to, u64 descriptor, u32 first, u32 rows, u32 k, int eight, FromHalf value, int transposed,
                   int by_rows) {
  const u32 bytes = eight ? 1 : 2, each = 16 / bytes;
  for (u32 r = 0; r < rows; r += transposed ? 8 : 1)
    for (u32 x = 0; x < k; x += transposed ? 1 : each) {
      const u8* chunk = chunk_at(w, descriptor, first + r, x, bytes, transposed);
      for (u32 e = 0; e < each; ++e) {
        const f32 y = eight ? e4m3_values[chunk[e]] : value(((const u16*)chunk)[e]);
        const u32 row = transposed ? r + e : r, column = transposed ? x : x + e;
        to[by_rows ? row * k + column : column * rows + row] = y;
      }
    }
}
// Two of every four columns of a, e4m3 in registers: to[16][64]. Which two a lane says of a row and half of its columns.
// Others take no part: a product that they leave out is not one with 0.
static void decode_kept(Warp* w, const Ins* i, f32* to, u8* is_kept, int at_a, int at_choices) {
  memset(is_kept, 0, 16 * 64);
  EACH for (int e = 0; e < 4; ++e) for (int byte = 0; byte < 4; ++byte) {
    const int row = l / 4 + e % 2 * 8, kept = e / 2 * 16 + l % 4 * 4 + byte, four = kept / 2;
    const u32 choices = ROW(u32, at_choices)[row % 8 * 4 + four / 8 * 2 + row / 8] >> four % 8 * 4 & 15;
    if ((choices & 3) >= choices >> 2) fail("wgmma: of four columns 0x%x are kept", choices);
    const int at = row * 64 + four * 4 + (kept % 2 ? choices >> 2 : choices & 3);
    to[at] = e4m3_values[ROW(u32, at_a + e)[l] >> byte * 8 & 255], is_kept[at] = 1;
  }
}
// `imm`: columns; `aux`: 1 a in registers, 2 a transposed, 4 b transposed, 8 e4m3, 16 float16 results, 32 bfloat16, 64 a
// has two of every four columns. Rows: results, a (4 registers or a descriptor), b's descriptor, predicate, which columns.
OP(wgmma) {
  const int columns = i->imm, eight = i->aux & 8, halves = i->aux & 16, kept = halves ? columns / 4 : columns / 2;
  const int in_registers = i->aux & 1, sparse = i->aux & 64;
  const int k = (eight ? 32 : 16) << !!sparse, at_b = kept + (in_registers ? 4 : 1);
  const FromHalf value = i->aux & 32 ? bf16_value : f16_value;
  const u32 p = PRED(at_b + 1);
  if (p != 0 && p != ALL) fail("wgmma: lanes differ in whether they add to what is there");
  static f32 a[16 * 64], b[64 * MOST_COLUMNS], d[16 * MOST_COLUMNS];
  static u8 is_kept[16 * 64];
  if (!e4m3_known) {
    for (int x = 0; x < 256; ++x) e4m3_values[x] = from_e4m3(x);
    e4m3_known = 1;
  }
  const int first = w->index % 4 * 16;
  if (sparse) {
    decode_kept(w, i, a, is_kept, kept, at_b + 2);
  } else if (in_registers) {
    if (eight) fail("wgmma: e4m3 in registers");
    EACH for (int e = 0; e < 4; ++e) {
      const u32 x = ROW(u32, kept + e)[l];
      f32* to = a + (l / 4 + e % 2 * 8) * 16 + l % 4 * 2 + e / 2 * 8;
      to[0] = value(x), to[1] = value(x >> 16);
    }
  } else {
    const u64* of = ROW(u64, kept);
    for (int l = 1; l < LANES; ++l) if (of[l] != of[0]) fail("wgmma: lanes differ in a's descriptor");
    decode(w, a, of[0], first, 16, k, eight, value, i->aux & 2, 1);
    note_reading(w, (Reading){of[0], 0, 0, first, 16, k, eight ? 1 : 2, i->aux & 2});
  }
  const u64* of = ROW(u64, at_b);
  for (int l = 1; l < LANES; ++l) if (of[l] != of[0]) fail("wgmma: lanes differ in b's descriptor");
  decode(w, b, of[0], 0, columns, k, eight, value, i->aux & 4, 0);
  note_reading(w, (Reading){of[0], 0, 0, 0, columns, k, eight ? 1 : 2, i->aux & 4});
  if (!p) memset(d, 0, 16 * columns * sizeof(f32));
  else EACH for (int j = 0; j < columns / 8; ++j)
    for (int e = 0; e < 4; ++e) {
      f32* to = d + (l / 4 + e / 2 * 8) * columns + j * 8 + l % 4 * 2 + e % 2;
      *to = halves ? from_f16(ROW(u32, j * 2 + e / 2)[l] >> e % 2 * 16) : ROW(f32, j * 4 + e)[l];
    }
  for (int r = 0; r < 16; ++r)
    for (int x = 0; x < k; ++x) {
      if (sparse && !is_kept[r * k + x]) continue;
      const f32 y = a[r * k + x];
      IVDEP for (int c = 0; c < columns; ++c) d[r * columns + c] += y * b[x * columns + c];
    }
  EACH for (int j = 0; j < columns / 8; ++j)
    for (int e = 0; e < 4; ++e) {
      const f32 x = d[(l / 4 + e / 2 * 8) * columns + j * 8 + l % 4 * 2 + e % 2];
      if (!halves) {
        ROW(f32, j * 4 + e)[l] = canonical(x);
      } else {
        u16* pair = (u16*)(ROW(u32, j * 2 + e / 2) + l);
        pair[e % 2] = to_f16(x);
      }
    }
}

// --- between lanes ---
// What lanes bring to an exchange, and which lanes are in it. A compiler may copy such an instruction into both branches
// of a condition; then each group of lanes has its own (machine.c's meet).
static u32 bring(Warp* w, const Ins* i, u32 m, u32* values) {
  memcpy(values, machine.together ? machine.values : ROW(u32, i->imm), LANES * sizeof(u32));
  return machine.together ? machine.together : m;
}
static u32 bring_votes(Warp* w, const Ins* i, u32 m, u32* votes) {
  u32 values[LANES];
  if (!machine.together) {
    *votes = i->aux & 1 ? ~PRED(1) : PRED(1);
    return m;
  }
  bring(w, i, m, values);
  *votes = 0;
  EACH *votes |= values[l] << l;
  return machine.together;
}
// What lane l brings, for machine.c.
u32 brought(Warp* w, const Ins* i, int l) {
  if (i->imm < 0) return i->aux & 1 ? !ON(PRED(1), l) : ON(PRED(1), l);
  return ROW(u32, i->imm)[l];
}
static void shuffle(Warp* w, const Ins* i, u32 m, int mode) {  // rows: d, predicate, a, b, c
  u32 from[LANES], d[LANES], valid = 0;
  const u32 there = bring(w, i, m, from);
  EACH if (ON(m, l)) {
    const u32 b = ROW(u32, 3)[l] & 31, c = ROW(u32, 4)[l], clamp = c & 31, segment = c >> 8 & 31;
    const int most = (l & segment) | (clamp & ~segment), least = l & segment;
    int j = mode == 0 ? (int)(least | (b & ~segment)) : mode == 1 ? l - (int)b : mode == 2 ? l + (int)b : (int)(l ^ b);
    int ok = mode == 1 ? j >= most : j <= most;
    if (!ok) j = l;
    else valid |= 1u << l;
    if (!ON(there, j)) fail("shfl.sync: lane %d reads of lane %d, which is not there", l, j);
    d[l] = from[j];
  }
  EACH if (ON(m, l)) ROW(u32, 0)[l] = d[l];
  if (i->aux & 1) PRED(1) = (PRED(1) & ~m) | valid;
}
OP(shfl_idx) { shuffle(w, i, m, 0); }
OP(shfl_up) { shuffle(w, i, m, 1); }
OP(shfl_down) { shuffle(w, i, m, 2); }
OP(shfl_bfly) { shuffle(w, i, m, 3); }
// Rows: d, predicate, mask. A lane's vote is of those in its mask.
#define VOTE(name, E)                                                   \
  OP(vote_##name) {                                                     \
    u32 p, y = 0;                                                       \
    const u32 there = bring_votes(w, i, m, &p);                         \
    EACH if (ON(m, l)) {                                                \
      const u32 mask = ROW(u32, 2)[l] & there;                          \
      if (E) y |= 1u << l;                                              \
    }                                                                   \
    PRED(0) = (PRED(0) & ~m) | y;                                       \
  }
VOTE(any, p & mask)
VOTE(all, (p & mask) == mask)
VOTE(uni, (p & mask) == mask || !(p & mask))
OP(vote_ballot) {
  u32 p;
  const u32 there = bring_votes(w, i, m, &p);
  EACH if (ON(m, l)) ROW(u32, 0)[l] = p & there & ROW(u32, 2)[l];
}
#define REDUX(name, T, first, E)                        \
  OP(redux_##name) {                                    \
    T d[LANES];                                         \
    u32 values[LANES];                                  \
    const u32 there = bring(w, i, m, values);           \
    EACH if (ON(m, l)) {                                \
      const u32 mask = ROW(u32, 2)[l] & there;          \
      T y = first;                                      \
      for (int j = 0; j < LANES; ++j)                   \
        if (ON(mask, j)) {                              \
          const T x = (T)values[j];                     \
          y = (E);                                      \
        }                                               \
      d[l] = y;                                         \
    }                                                   \
    EACH if (ON(m, l)) ROW(T, 0)[l] = d[l];             \
  }
REDUX(add_u32, u32, 0, y + x)
REDUX(min_u32, u32, ALL, y < x ? y : x)
REDUX(max_u32, u32, 0, y > x ? y : x)
REDUX(min_s32, s32, INT32_MAX, y < x ? y : x)
REDUX(max_s32, s32, INT32_MIN, y > x ? y : x)
REDUX(and_u32, u32, ALL, y & x)
REDUX(or_u32, u32, 0, y | x)
REDUX(xor_u32, u32, 0, y ^ x)
OP(match_any_b32) {
  u32 d[LANES];
  EACH if (ON(m, l)) {
    d[l] = 0;
    for (int j = 0; j < LANES; ++j)
      if (ON(m & ROW(u32, 2)[l], j) && ROW(u32, 1)[j] == ROW(u32, 1)[l]) d[l] |= 1u << j;
  }
  EACH if (ON(m, l)) ROW(u32, 0)[l] = d[l];
}
OP(activemask) { EACH if (ON(m, l)) ROW(u32, 0)[l] = m; }
OP(elect) {  // rows: d, predicate, mask
  const u32 lead = __builtin_ctz(m);
  EACH if (ON(m, l) && i->aux & 1) ROW(u32, 0)[l] = lead;
  PRED(1) = (PRED(1) & ~m) | 1u << lead;
}
