// Loads, stores, atomics and asynchronous copies, each checked against the arrays that are known.
#include "machine.h"

static u64 address_of(Warp* w, const Ins* i, int k, int l) {  // `aux` bit 0: the base is a 32-bit register
  return (i->aux & 1 ? ROW(u32, k)[l] : ROW(u64, k)[l]) + (u64)i->imm;
}

u8* global_at(u64 address, u32 bytes) {
  for (int k = 0; k < 4; ++k)
    if (address >= machine.last[k].from && address + bytes <= machine.last[k].end) return (u8*)address;
  s64 low = 0, high = machine.range_count;  // the last range that starts at the address or before
  while (low < high) {
    s64 middle = (low + high) / 2;
    if (machine.ranges[middle].from <= address) low = middle + 1;
    else high = middle;
  }
  if (low == 0 || address + bytes > machine.ranges[low - 1].end) {
    if (low > 0 && address < machine.ranges[low - 1].end + (1 << 20))
      fail("%u bytes of global memory at 0x%llx are outside of every array: %lld bytes behind the start of one of %llu",
           bytes, (unsigned long long)address, (long long)(address - machine.ranges[low - 1].from),
           (unsigned long long)(machine.ranges[low - 1].end - machine.ranges[low - 1].from));
    if (low < machine.range_count && address + (1 << 20) > machine.ranges[low].from)
      fail("%u bytes of global memory at 0x%llx are outside of every array: %lld bytes before one of %llu", bytes,
           (unsigned long long)address, (long long)(machine.ranges[low].from - address),
           (unsigned long long)(machine.ranges[low].end - machine.ranges[low].from));
    fail("%u bytes of global memory at 0x%llx are outside of every array", bytes, (unsigned long long)address);
  }
  memmove(machine.last + 1, machine.last, sizeof machine.last - sizeof machine.last[0]);
  machine.last[0] = machine.ranges[low - 1];
  return (u8*)address;
}

u8* shared_at(Warp* w, u32 address, u32 bytes) {
  Block* b = w->block;
  u32 offset = address;
  if (address >= SHARED_WINDOW) {
    const u32 rank = address / SHARED_WINDOW - 1;
    if (rank >= (u32)b->cluster->size) fail("shared memory of block %u of a cluster of %d", rank, b->cluster->size);
    b = b->cluster->blocks + rank;
    if (b->live_warps == 0) fail("shared memory of block %u of the cluster, which has ended", rank);
    offset = address % SHARED_WINDOW;
  }
  if (offset < SHARED_BASE || offset + bytes > SHARED_BASE + b->shared_bytes)
    fail("%u bytes of shared memory at %d are outside of the block's %u", bytes, (int)(offset - SHARED_BASE),
         b->shared_bytes);
  return b->shared + (offset - SHARED_BASE);
}

static inline void check_alignment(u64 address, u32 bytes) {
  if (address % bytes) fail("%u bytes at 0x%llx, which is no multiple of that", bytes, (unsigned long long)address);
}

#define AT_global(a, n) global_at(a, n)
#define AT_shared(a, n) shared_at(w, (u32)(a), n)
#define AT_host(a, n) ((u8*)(a))  // parameters and locals

// ld of `n` elements: rows 0 .. n - 1 are written, row n has the address.
#define LOAD(space, name, T, TD)                                                 \
  OP(ld_##space##_##name) {                                                      \
    const u32 n = i->n, bytes = n * sizeof(T);                                   \
    EACH if (ON(m, l)) {                                                         \
      const u64 a = address_of(w, i, n, l);                                      \
      check_alignment(a, bytes);                                                 \
      const T* from = (const T*)AT_##space(a, bytes);                            \
      for (u32 k = 0; k < n; ++k) ROW(TD, k)[l] = (TD)from[k];                   \
    }                                                                            \
  }
#define LOADS(space)                       \
  LOAD(space, u8_16, u8, u16)              \
  LOAD(space, s8_16, s8, s16)              \
  LOAD(space, u8_32, u8, u32)              \
  LOAD(space, s8_32, s8, s32)              \
  LOAD(space, u16_16, u16, u16)            \
  LOAD(space, u16_32, u16, u32)            \
  LOAD(space, s16_32, s16, s32)            \
  LOAD(space, u32_32, u32, u32)            \
  LOAD(space, u8_64, u8, u64)              \
  LOAD(space, s8_64, s8, s64)              \
  LOAD(space, u16_64, u16, u64)            \
  LOAD(space, s16_64, s16, s64)            \
  LOAD(space, u32_64, u32, u64)            \
  LOAD(space, s32_64, s32, s64)            \
  LOAD(space, u64_64, u64, u64)
LOADS(global)
LOADS(shared)
LOADS(host)
// st: row 0 has the address, rows 1 .. n the values.
#define STORE_TO(space, name, T, TS)                                             \
  OP(st_##space##_##name) {                                                      \
    const u32 n = i->n, bytes = n * sizeof(T);                                   \
    EACH if (ON(m, l)) {                                                         \
      const u64 a = address_of(w, i, 0, l);                                      \
      check_alignment(a, bytes);                                                 \
      T* to = (T*)AT_##space(a, bytes);                                          \
      for (u32 k = 0; k < n; ++k) to[k] = (T)ROW(TS, 1 + k)[l];                  \
    }                                                                            \
  }
#define STORES(space)                      \
  STORE_TO(space, u8_16, u8, u16)          \
  STORE_TO(space, u8_32, u8, u32)          \
  STORE_TO(space, u16_16, u16, u16)        \
  STORE_TO(space, u16_32, u16, u32)        \
  STORE_TO(space, u32_32, u32, u32)        \
  STORE_TO(space, u8_64, u8, u64)          \
  STORE_TO(space, u16_64, u16, u64)        \
  STORE_TO(space, u32_64, u32, u64)        \
  STORE_TO(space, u64_64, u64, u64)
STORES(global)
STORES(shared)
STORES(host)

// atom: row 0 the old value, row 1 the address, row 2 the operand; red: row 1 and 2 the same, row 0 of no use.
#define ATOMIC(space, op, T, E)                             \
  OP(atom_##space##_##op) {                                 \
    EACH if (ON(m, l)) {                                    \
      const u64 a = address_of(w, i, 1, l);                 \
      check_alignment(a, sizeof(T));                        \
      T* at = (T*)AT_##space(a, sizeof(T));                 \
      const T old = *at, x = ROW(T, 2)[l];                  \
      *at = (E);                                            \
      if (i->aux & 2) ROW(T, 0)[l] = old;                   \
    }                                                       \
  }
#define ATOMICS(space)                                              \
  ATOMIC(space, add_u32, u32, old + x)                              \
  ATOMIC(space, add_u64, u64, old + x)                              \
  ATOMIC(space, add_f32, f32, canonical(old + x))                   \
  ATOMIC(space, or_u32, u32, old | x)                               \
  ATOMIC(space, or_u64, u64, old | x)                               \
  ATOMIC(space, and_u32, u32, old & x)                              \
  ATOMIC(space, xor_u32, u32, old ^ x)                              \
  ATOMIC(space, exch_u32, u32, x)                                   \
  ATOMIC(space, max_u32, u32, old > x ? old : x)                    \
  ATOMIC(space, max_s32, s32, old > x ? old : x)                    \
  ATOMIC(space, min_u32, u32, old < x ? old : x)                    \
  ATOMIC(space, min_s32, s32, old < x ? old : x)                    \
  ATOMIC(space, max_u64, u64, old > x ? old : x)                    \
  ATOMIC(space, min_u64, u64, old < x ? old : x)
ATOMICS(global)
ATOMICS(shared)

OP(mapa_u32) {
  EACH if (ON(m, l)) {
    const u32 a = ROW(u32, 1)[l], rank = ROW(u32, 2)[l];
    ROW(u32, 0)[l] = a % SHARED_WINDOW + (rank + 1) * SHARED_WINDOW;
  }
}
OP(nothing) {}

// --- cp.async ---
static void land(const Copy* c) {
  if (c->barrier) {
    barrier_arrive(c->barrier, 1);
  } else if (c->zeros) {
    memset(c->to, 0, c->bytes);
  } else {
    memcpy(c->to, c->from, c->bytes);
  }
}
void add_copy(Warp* w, Copy copy) {
  if (!machine.late) {
    land(&copy);
    return;
  }
  if (w->copy_count == w->copy_room) {
    w->copy_room = w->copy_room ? 2 * w->copy_room : 256;
    w->copies = realloc(w->copies, w->copy_room * sizeof(Copy));
  }
  copy.group = w->group_of_lane[copy.lane];
  w->copies[w->copy_count++] = copy;
}
// Those of `lanes` that are not of a lane's last `allowed` closed groups nor of its open one; or all.
void land_copies(Warp* w, u32 lanes, u32 allowed, int all) {
  int kept = 0;
  for (int k = 0; k < w->copy_count; ++k) {
    const Copy* c = w->copies + k;
    if (ON(lanes, c->lane) && (all || c->group + allowed < w->group_of_lane[c->lane])) land(c);
    else w->copies[kept++] = *c;
  }
  w->copy_count = kept;
}
// Row 0: shared address, row 1: global one; `n`: bytes; row 2: predicate of zeros or row of bytes that are read.
OP(cp_async) {
  EACH if (ON(m, l)) {
    const u32 to = ROW(u32, 0)[l] + (i->imm >> 32);
    const u64 from = ROW(u64, 1)[l] + (s32)i->imm;
    check_alignment(to, i->n), check_alignment(from, i->n);
    const int zeros = i->aux & 2 ? ON(PRED(2), l) : 0;
    Copy c = {shared_at(w, to, i->n), (u8*)from, 0, i->n, l, 0, zeros};
    if (!zeros) global_at(from, i->n);
    add_copy(w, c);
  }
}
OP(cp_async_commit_group) { EACH if (ON(m, l)) w->group_of_lane[l] += 1; }
OP(cp_async_wait_group) { land_copies(w, m, i->imm, 0); }
OP(cp_async_wait_all) { land_copies(w, m, 0, 1); }
OP(cp_async_mbarrier_arrive_noinc) {
  EACH if (ON(m, l)) {
    Copy c = {0, 0, barrier_at(w, address_of(w, i, 0, l)), 0, l, 0, 0};
    add_copy(w, c);
  }
}

// --- mbarriers: 15 bits of arrivals to come, 15 of those of a phase, its parity, 24 of bytes to come, a mark ---
#define PENDING(x) ((u32)(x) & 0x7fff)
#define MARK 0xa5ull
static u64 barrier_word(u32 pending, u32 expected, u32 phase, s32 bytes) {
  return pending | (u64)expected << 15 | (u64)phase << 30 | (u64)((u32)bytes & 0xffffff) << 31 | MARK << 56;
}
static void barrier_set(u64* barrier, s32 pending, u32 expected, u32 phase, s32 bytes) {
  if (pending < 0) fail("more threads arrive at an mbarrier than it was made for (%u)", expected);
  if (pending == 0 && bytes == 0) pending = expected, phase ^= 1;
  *barrier = barrier_word(pending, expected, phase, bytes);
}
#define BARRIER_FIELDS                                                                         \
  const u64 x = *barrier;                                                                      \
  if (x >> 56 != MARK) fail("an mbarrier that was not initialised, or was written over");      \
  const s32 pending = x & 0x7fff, bytes_ = ((s32)(x >> 31 & 0xffffff) ^ 0x800000) - 0x800000;  \
  const u32 expected = x >> 15 & 0x7fff, phase = x >> 30 & 1;
void barrier_arrive(u64* barrier, u32 count) {
  BARRIER_FIELDS
  barrier_set(barrier, pending - count, expected, phase, bytes_);
}
void barrier_expect(u64* barrier, u32 bytes) {
  BARRIER_FIELDS
  *barrier = barrier_word(pending, expected, phase, bytes_ + bytes);
}
void barrier_complete(u64* barrier, u32 bytes) {
  BARRIER_FIELDS
  barrier_set(barrier, pending, expected, phase, bytes_ - bytes);
}
u64* barrier_at(Warp* w, u32 address) {
  check_alignment(address, 8);
  return (u64*)shared_at(w, address, 8);
}
OP(mbarrier_init) {  // row 0: address, row 1: count
  EACH if (ON(m, l)) {
    const u32 count = ROW(u32, 1)[l];
    *barrier_at(w, address_of(w, i, 0, l)) = barrier_word(count, count, 0, 0);
  }
}
OP(mbarrier_arrive) { EACH if (ON(m, l)) barrier_arrive(barrier_at(w, address_of(w, i, 0, l)), 1); }
OP(mbarrier_arrive_count) {
  EACH if (ON(m, l)) barrier_arrive(barrier_at(w, address_of(w, i, 0, l)), ROW(u32, 1)[l]);
}
OP(mbarrier_expect_tx) {
  EACH if (ON(m, l)) barrier_expect(barrier_at(w, address_of(w, i, 0, l)), ROW(u32, 1)[l]);
}
OP(mbarrier_arrive_expect_tx) {
  EACH if (ON(m, l)) {
    u64* barrier = barrier_at(w, address_of(w, i, 0, l));
    barrier_expect(barrier, ROW(u32, 1)[l]);
    barrier_arrive(barrier, 1);
  }
}
OP(mbarrier_try_wait) {  // row 0: predicate, row 1: address, row 2: parity
  u32 done = 0;
  EACH if (ON(m, l)) {
    u64* barrier = barrier_at(w, address_of(w, i, 1, l));
    BARRIER_FIELDS
    (void)pending, (void)bytes_, (void)expected;
    if (phase != (ROW(u32, 2)[l] & 1)) done |= 1u << l;
  }
  PRED(0) = (PRED(0) & ~m) | done;
  if (done != m) w->yields = 1;
}

// --- the copy engine ---
typedef struct TensorMap {  // as the emulated driver writes it (driver.py)
  u64 mark, pointer;
  u32 axes, swizzle;
  u64 strides[4];  // bytes, from the second axis on
  u32 sizes[5];
  u16 box[5];
} TensorMap;
_Static_assert(sizeof(TensorMap) <= 128, "a tensor map has 128 bytes");

static void land_bulk(Warp* w, const Bulk* b, u32 rank) {
  const u32 window = (rank + 1) * SHARED_WINDOW, to = b->to % SHARED_WINDOW + window;
  u32 bytes = b->bytes;
  if (!b->is_tensor) {
    memcpy(shared_at(w, to, bytes), b->from, bytes);
  } else {
    TensorMap map;
    memcpy(&map, b->map, sizeof map);
    u32 box[5] = {1, 1, 1, 1, 1}, row = map.box[0] * 2;
    s64 size[5] = {1, 1, 1, 1, 1}, stride[5] = {2, 0, 0, 0, 0}, at[5] = {0, 0, 0, 0, 0};
    for (u32 k = 0; k < map.axes; ++k) {
      box[k] = map.box[k], size[k] = map.sizes[k], at[k] = b->at[k];
      if (k) stride[k] = map.strides[k - 1];
    }
    u32 offset = 0;
    for (u32 e = 0; e < box[4]; ++e)
      for (u32 d = 0; d < box[3]; ++d)
        for (u32 c = 0; c < box[2]; ++c)
          for (u32 r = 0; r < box[1]; ++r, offset += row) {
            const s64 x[5] = {at[0], at[1] + r, at[2] + c, at[3] + d, at[4] + e};
            int inside = 1;
            for (int k = 1; k < 5; ++k) inside &= x[k] >= 0 && x[k] < size[k];
            for (u32 byte = 0; byte < row; byte += 16) {
              u32 target = to % SHARED_WINDOW + offset + byte;
              if (map.swizzle == 3) target ^= (target >> 7 & 7) << 4;
              u8* place = shared_at(w, target + window, 16);
              for (u32 k = 0; k < 16; k += 2) {
                const s64 column = x[0] + (byte + k) / 2;
                u16 value = 0;
                if (inside && column >= 0 && column < size[0]) {
                  const u64 from =
                      map.pointer + 2 * column + x[1] * stride[1] + x[2] * stride[2] + x[3] * stride[3] + x[4] * stride[4];
                  value = *(u16*)global_at(from, 2);
                }
                memcpy(place + k, &value, 2);
              }
            }
          }
    bytes = offset;
  }
  barrier_complete((u64*)shared_at(w, b->barrier % SHARED_WINDOW + window, 8), bytes);
}
void land_one_bulk(Warp* w, const Bulk* b) {
  for (u32 rank = 0; rank < 16; ++rank)
    if (b->blocks >> rank & 1) land_bulk(w, b, rank);
}
void add_bulk(Warp* w, const Bulk* bulk) {
  if (!machine.late) {
    land_one_bulk(w, bulk);
    return;
  }
  Cluster* c = w->block->cluster;
  if (c->bulk_count == c->bulk_room) {
    c->bulk_room = c->bulk_room ? 2 * c->bulk_room : 64;
    c->bulks = realloc(c->bulks, c->bulk_room * sizeof(Bulk));
  }
  c->bulks[c->bulk_count++] = *bulk;
}
static u32 rank_of(Warp* w, u32 address) {
  return address >= SHARED_WINDOW ? address / SHARED_WINDOW - 1 : w->block->rank;
}
OP(cp_async_bulk) {  // rows: shared address, global address, bytes, mbarrier
  EACH if (ON(m, l)) {
    Bulk b = {.to = ROW(u32, 0)[l], .from = (u8*)ROW(u64, 1)[l], .bytes = ROW(u32, 2)[l], .barrier = ROW(u32, 3)[l]};
    if (b.to % 16 || (u64)b.from % 16 || b.bytes % 16) fail("cp.async.bulk of what is not in 16-byte steps");
    global_at((u64)b.from, b.bytes), shared_at(w, b.to, b.bytes);
    b.blocks = 1u << rank_of(w, b.to);
    add_bulk(w, &b);
  }
}
OP(cp_async_bulk_tensor) {  // rows: shared address, map, `n` coordinates, mbarrier and, if aux bit 1, the blocks
  EACH if (ON(m, l)) {
    Bulk b = {.is_tensor = 1, .to = ROW(u32, 0)[l], .axes = i->n, .barrier = ROW(u32, 2 + i->n)[l]};
    const u64 map = ROW(u64, 1)[l];
    if (map % 64) fail("a tensor map at 0x%llx", (unsigned long long)map);
    memcpy(b.map, (void*)map, 128);
    if (((TensorMap*)b.map)->mark != 0x53324f4d41505f5full) fail("no tensor map is at 0x%llx", (unsigned long long)map);
    if (((TensorMap*)b.map)->axes != i->n) fail("a tensor map of %u axes and %u coordinates", ((TensorMap*)b.map)->axes, i->n);
    if (b.to % (((TensorMap*)b.map)->swizzle == 3 ? 1024 : 128) % 128) fail("a box at %u in shared memory", b.to);
    for (u32 k = 0; k < i->n; ++k) b.at[k] = ROW(s32, 2 + k)[l];
    b.blocks = i->aux & 2 ? ROW(u16, 3 + i->n)[l] : 1u << rank_of(w, b.to);
    add_bulk(w, &b);
  }
}
