// What the instructions work on. A register is a row of 32 lanes' values; a predicate register is one 32-bit word.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

#define LANES 32
#define ALL 0xffffffffu
#define SHARED_BASE 1024u      // where a block's shared memory starts in its window
#define SHARED_WINDOW (1u << 24)  // of one block of a cluster; block r's starts at (r + 1) << 24, and one's own also at 0

struct Warp;
struct Ins;
typedef void (*Run)(struct Warp*, const struct Ins*, u32 mask);

enum Kind { PLAIN, LABEL, BRANCH, EXIT, SYNC_ALL, SYNC_MASK, BARRIER };  // how the scheduler treats an instruction

typedef struct Ins {
  Run run;
  const s32* o;  // operands: byte offsets of rows in a warp's registers
  s64 imm;       // a branch's target, an address's offset, ...
  s32 guard;     // predicate's offset, -1: none
  s32 member;    // operand that has the mask of a SYNC_MASK instruction
  s32 line;      // of the PTX text
  u8 kind, negated, aux, n;
} Ins;

typedef struct Copy {  // a cp.async that has not landed, or an mbarrier's note behind those before it
  u8* to;
  const u8* from;
  u64* barrier;
  u32 bytes, lane, group;
  u8 zeros;
} Copy;

typedef struct Group {  // lanes at one instruction
  s32 pc;
  u32 mask;
  u8 parked, slept;
} Group;

#define MOST_READINGS 512
typedef struct Reading {  // an operand of a wgmma that has not been waited for
  u64 descriptor, digest;
  u32 group, first, rows, k, bytes, transposed;
} Reading;

typedef struct Warp {
  u8* regs;
  s32 pc;
  u32 active, live;
  Group groups[LANES];
  int others;  // groups besides the active lanes
  int yields, done, blocked, released;
  s32 blocked_on;
  u32 barrier_result;
  u32 cluster_phase;
  int index;
  struct Block* block;
  Copy* copies;
  int copy_count, copy_room;
  u32 group_of_lane[LANES];  // cp.async groups closed
  u8* local;
  Reading readings[MOST_READINGS];
  int reading_count;
  u32 wgmma_groups;  // closed
  u64 executed;
} Warp;

typedef struct Barrier {
  u32 arrived, wanted, popc, all, any;
} Barrier;

typedef struct Block {
  u8* shared;
  u32 shared_bytes;
  u32 rank, ctaid;
  struct Cluster* cluster;
  Warp* warps;
  int warp_count, live_warps;
  Barrier barriers[16];
} Block;

typedef struct Bulk {  // a copy of the copy engine
  u8 map[128];
  const u8* from;
  u32 to, bytes, barrier, axes;
  s32 at[5];
  u16 blocks;  // by rank
  int is_tensor;
} Bulk;

typedef struct Cluster {
  Block* blocks;
  int size, running;
  u32 arrived, phase, live_warps;
  Bulk* bulks;
  int bulk_count, bulk_room;
  u64 index;
} Cluster;

typedef struct Kernel {
  const Ins* code;
  s64 length;
  const u8* constants;  // the last rows of each warp's registers
  s64 constant_bytes, register_bytes;
  s64 specials[8];  // offsets of rows, -1: unused: tid, ctaid, ntid, nctaid, cluster_ctarank, laneid, warpid, smid
  s64 local_bytes, local_row;
  s64 static_shared;
  s64 param_row;
  const char* name;
} Kernel;

typedef struct Range {
  u64 from, end;
} Range;

typedef struct Machine {
  jmp_buf failed;
  char message[512];
  Range* ranges;
  s64 range_count;
  Range last[4];
  u64 random;
  int late;           // copies land as late as they may, else at once
  u64 limit;          // warp instructions of a launch
  u64 executed;
  const Kernel* kernel;
  Warp* now;
  const Ins* at;
  u32 together;         // lanes of an exchange whose instruction a compiler has put in two places; 0: it is one
  u32 values[LANES];    // that these bring
} Machine;

extern Machine machine;

void fail(const char* format, ...) __attribute__((noreturn, format(printf, 1, 2)));
u8* global_at(u64 address, u32 bytes);
u8* shared_at(Warp* w, u32 address, u32 bytes);
void barrier_arrive(u64* barrier, u32 count);
void barrier_expect(u64* barrier, u32 bytes);
void barrier_complete(u64* barrier, u32 bytes);
u64* barrier_at(Warp* w, u32 address);
void add_copy(Warp* w, Copy copy);
void add_bulk(Warp* w, const Bulk* bulk);
void land_copies(Warp* w, u32 lanes, u32 allowed, int all);
u32 next_random(void);

#define ROW(T, k) ((T*)(w->regs + i->o[k]))
#define PRED(k) (*(u32*)(w->regs + i->o[k]))
#define ON(m, l) ((m) >> (l) & 1)
#define EACH for (int l = 0; l < LANES; ++l)
#define IVDEP _Pragma("GCC ivdep")
#define OP(name) void op_##name(Warp* w, const Ins* i, u32 m)

static inline u32 bits_of(f32 x) {
  u32 b;
  memcpy(&b, &x, 4);
  return b;
}
static inline f32 float_of(u32 b) {
  f32 x;
  memcpy(&x, &b, 4);
  return x;
}
static inline f32 canonical(f32 x) { return x != x ? float_of(0x7fffffffu) : x; }
static inline f32 from_bf16(u16 b) { return float_of((u32)b << 16); }
u16 to_bf16(f32 x);
f32 from_f16(u16 b);
u16 to_f16(f64 x);
u8 to_e4m3(f32 x);
f32 from_e4m3(u8 x);
