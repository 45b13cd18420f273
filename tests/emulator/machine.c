// Warps, blocks and clusters: which lanes of which warp run next, barriers, and a launch from its start to its end.
#include <immintrin.h>

#include "machine.h"

Machine machine;

void land_one_bulk(Warp* w, const Bulk* b);

void fail(const char* format, ...) {
  char what[320];
  va_list list;
  va_start(list, format);
  vsnprintf(what, sizeof what, format, list);
  va_end(list);
  const Warp* w = machine.now;
  snprintf(machine.message, sizeof machine.message, "%d|%s, in %s, block %d, warp %d, lanes %08x",
           machine.at ? machine.at->line : -1, what, machine.kernel->name, w ? (int)w->block->ctaid : -1,
           w ? w->index : -1, w ? w->active : 0);
  longjmp(machine.failed, 1);
}

u32 next_random(void) {  // xorshift64*
  u64 x = machine.random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  machine.random = x;
  return x * 0x2545f4914f6cdd1dull >> 32;
}

// --- lanes of a warp ---
// The lanes at the smallest instruction go on, as a compiler lays loops out before what follows them. Those that wait
// for others (parked) or spin (slept) let the rest go first. False: all lanes wait.
static int choose_lanes(Warp* w) {
  int n = w->others, best = -1;
  if (n == 0) return 1;
  for (int k = 0; k < n; ++k) {
    const Group* g = w->groups + k;
    if (g->parked || g->slept) continue;
    if (best < 0 || g->pc < w->groups[best].pc) best = k;
  }
  if (best < 0) return 0;
  w->pc = w->groups[best].pc, w->active = w->groups[best].mask;
  w->groups[best] = w->groups[--w->others];
  return 1;
}
static void put_back(Warp* w, s32 pc, u32 mask, int parked, int slept) {
  for (int k = 0; k < w->others; ++k)
    if (w->groups[k].pc == pc) {
      w->groups[k].mask |= mask, w->groups[k].parked = 0, w->groups[k].slept |= slept;
      return;
    }
  w->groups[w->others++] = (Group){pc, mask, parked, slept};
}
static void wake(Warp* w) {
  for (int k = 0; k < w->others; ++k) w->groups[k].slept = 0;
}

// Groups of lanes that wait for each other at several copies of one instruction, which exchanges values: all copies run.
// False: they wait at different ones.
u32 brought(Warp* w, const Ins* i, int l);
static int meet(Warp* w) {
  const Ins* code = machine.kernel->code;
  const Ins* first = code + w->groups[0].pc;
  u32 there = 0;
  for (int k = 0; k < w->others; ++k) {
    const Ins* i = code + w->groups[k].pc;
    if (i->kind != SYNC_MASK || i->run != first->run || i->guard >= 0) return 0;
    there |= w->groups[k].mask;
    EACH if (ON(w->groups[k].mask, l)) machine.values[l] = i->imm ? brought(w, i, l) : 0;
  }
  for (int k = 0; k < w->others; ++k)
    EACH if (ON(w->groups[k].mask, l)) {
      const u32 mask = *(u32*)(w->regs + code[w->groups[k].pc].member + 4 * l);
      if (mask & w->live & ~there) return 0;
    }
  machine.together = there;
  for (int k = 0; k < w->others; ++k) {
    Group* g = w->groups + k;
    machine.at = code + g->pc;
    machine.at->run(w, machine.at, g->mask);
    g->pc += 1, g->parked = 0;
  }
  machine.together = 0;
  return choose_lanes(w);
}

// --- barriers of a block ---
static void release(Block* b, int id) {
  Barrier* x = b->barriers + id;
  for (int k = 0; k < b->warp_count; ++k) {
    Warp* w = b->warps + k;
    if (w->blocked && w->blocked_on == id) {
      const Ins* i = machine.kernel->code + w->pc;
      w->barrier_result = i->aux == 1 ? x->popc : i->aux == 2 ? x->all : x->any;
      w->blocked = 0, w->released = 1;
    }
  }
  *x = (Barrier){.all = 1};
}
static void settle(Block* b, int id) {
  Barrier* x = b->barriers + id;
  const u32 wanted = x->wanted ? x->wanted : (u32)b->live_warps * LANES;
  if (x->arrived > wanted) fail("barrier %d: %u threads arrive and %u are to", id, x->arrived, wanted);
  if (x->arrived && x->arrived == wanted) release(b, id);
}
// True: the warp goes on. Rows: barrier, count, result, predicate; `n`: bit 0 has a count, bit 1 a predicate, bit 2 only arrives.
static int block_barrier(Warp* w, const Ins* i) {
  if (w->released) {
    w->released = 0;
    if (i->aux == 1) EACH ROW(u32, 2)[l] = w->barrier_result;
    if (i->aux >= 2) PRED(2) = w->barrier_result ? ALL : 0;
    return 1;
  }
  const u32 id = ROW(u32, 0)[__builtin_ctz(w->active)];
  EACH if (ON(w->active, l) && ROW(u32, 0)[l] != id) fail("lanes differ in the barrier that they come to");
  if (id > 15) fail("barrier %u", id);
  Barrier* x = w->block->barriers + id;
  const u32 wanted = i->n & 1 ? ROW(u32, 1)[__builtin_ctz(w->active)] : 0;
  if (wanted % LANES) fail("a barrier of %u threads", wanted);
  if (x->arrived && x->wanted != wanted) fail("barrier %u: of %u threads for some and of %u for others", id, x->wanted, wanted);
  x->wanted = wanted;
  x->arrived += LANES;
  if (i->n & 2) {
    const u32 p = PRED(3) & w->live;
    x->popc += __builtin_popcount(p), x->all &= p == w->live, x->any |= p != 0;
  }
  if (!(i->n & 4)) w->blocked = 1, w->blocked_on = id;
  settle(w->block, id);
  if (i->n & 4) return 1;
  if (w->released) return block_barrier(w, i);
  return 0;
}
OP(bar) {}  // block_barrier is called where warps are scheduled
OP(barrier_cluster_arrive) {
  Cluster* c = w->block->cluster;
  w->cluster_phase = c->phase;
  if (++c->arrived == c->live_warps) c->arrived = 0, c->phase += 1;
}
OP(barrier_cluster_wait) {  // spins: the scheduler comes back to the same instruction
  if (w->block->cluster->phase == w->cluster_phase) w->yields = 2;
}
OP(bra) {}
OP(exit) {}
OP(trap) { fail("trap"); }

static void end_of_warp(Warp* w) {
  land_copies(w, ALL, 0, 1);
  Block* b = w->block;
  w->done = 1;
  b->live_warps -= 1;
  Cluster* c = b->cluster;
  c->live_warps -= 1;
  for (int id = 0; id < 16; ++id)
    if (b->live_warps && !b->barriers[id].wanted) settle(b, id);
  if (c->live_warps && c->arrived == c->live_warps) c->arrived = 0, c->phase += 1;
}

// Runs a warp for a while. 0: it spins or waits, 1: it did something, 2: it has ended.
static int run_warp(Warp* w, s64 budget) {
  const Ins* code = machine.kernel->code;
  machine.now = w;
  const s64 given = budget;
  int spun = 0;
  while (budget-- > 0) {
    const Ins* i = code + w->pc;
    machine.at = i;
    u32 m = w->active;
    if (i->guard >= 0) {
      const u32 p = *(u32*)(w->regs + i->guard);
      m &= i->negated ? ~p : p;
    }
    switch (i->kind) {
      case PLAIN:
        w->pc += 1;
        if (m) i->run(w, i, m);
        if (w->yields) {
          spun = 1;
          if (w->yields == 2) w->pc -= 1;
          w->yields = 0;
          if (w->others) {
            put_back(w, w->pc, w->active, 0, 1);
            if (choose_lanes(w)) continue;
            wake(w);
            if (!choose_lanes(w)) fail("all lanes wait for others of their warp");
          }
          goto out;
        }
        break;
      case LABEL:
        w->pc += 1;
        if (w->others) {
          put_back(w, w->pc, w->active, 0, 0);
          if (!choose_lanes(w)) {
            wake(w);
            if (!choose_lanes(w)) fail("all lanes wait for others of their warp");
            goto out;
          }
        }
        break;
      case BRANCH: {
        const u32 rest = w->active & ~m;
        if (!m) {
          w->pc += 1;
        } else if (!rest && !w->others) {
          w->pc = i->imm;
        } else {
          if (rest) put_back(w, w->pc + 1, rest, 0, 0);
          put_back(w, i->imm, m, 0, 0);
          if (!choose_lanes(w)) {
            wake(w);
            if (!choose_lanes(w)) fail("all lanes wait for others of their warp");
            goto out;
          }
        }
        break;
      }
      case EXIT:
        w->live &= ~m, w->active &= ~m;
        if (w->active) {
          w->pc += 1;
        } else if (w->others) {
          // whoever waits for lanes that are gone may not any more
          for (int k = 0; k < w->others; ++k) w->groups[k].parked = 0;
          if (!choose_lanes(w)) {
            wake(w);
            choose_lanes(w);
          }
        } else {
          w->executed += given - budget, machine.executed += given - budget;
          end_of_warp(w);
          return 2;
        }
        break;
      default: {  // of lanes that must be together
        u32 need = ALL;
        if (i->kind == SYNC_MASK) {
          need = 0;
          EACH if (ON(w->active, l)) {
            const u32 mask = *(u32*)(w->regs + i->member + 4 * l);
            if (!ON(mask, l)) fail("lane %d comes to an instruction of lanes %08x", l, mask);
            need |= mask;
          }
        }
        need &= w->live;
        if (need & ~w->active) {
          put_back(w, w->pc, w->active, 1, 0);
          if (!choose_lanes(w)) {
            wake(w);
            if (!choose_lanes(w) && !meet(w)) {
              char where[160] = "";
              for (int k = 0; k < w->others; ++k)
                snprintf(where + strlen(where), sizeof where - strlen(where), " %08x at PTX line %d", w->groups[k].mask,
                         code[w->groups[k].pc].line + 1);
              fail("lanes that must come together wait at different places:%s", where);
            }
            break;
          }
          break;
        }
        if (i->kind == BARRIER) {
          if (!m) {
            w->pc += 1;
            break;
          }
          if (!block_barrier(w, i)) goto out;
          w->pc += 1;
        } else {
          if (m) i->run(w, i, m);
          if (w->yields) {  // nobody goes on before the other warps of a wgmma have come to it
            w->yields = 0, spun = 1;
            goto out;
          }
          w->pc += 1;
        }
      }
    }
  }
out:
  w->executed += given - budget, machine.executed += given - budget;
  if (machine.executed > machine.limit) fail("more than %llu instructions", (unsigned long long)machine.limit);
  return spun ? 0 : 1;
}

// --- clusters ---
static void set_row(Warp* w, s64 offset, u32 value) {
  if (offset >= 0) EACH ((u32*)(w->regs + offset))[l] = value;
}
static void start_cluster(Cluster* c, u64 index, u32 blocks, u32 threads) {
  const Kernel* k = machine.kernel;
  c->index = index, c->running = 1, c->arrived = 0, c->phase = 0, c->bulk_count = 0, c->live_warps = 0;
  for (int r = 0; r < c->size; ++r) {
    Block* b = c->blocks + r;
    b->cluster = c, b->rank = r, b->ctaid = index * c->size + r, b->live_warps = b->warp_count;
    c->live_warps += b->warp_count;
    memset(b->shared, 0xff, b->shared_bytes);
    for (int id = 0; id < 16; ++id) b->barriers[id] = (Barrier){.all = 1};
    for (int x = 0; x < b->warp_count; ++x) {
      Warp* w = b->warps + x;
      w->block = b, w->index = x, w->pc = 0, w->active = w->live = ALL, w->others = 0;
      w->yields = w->done = w->blocked = w->released = 0, w->copy_count = 0, w->executed = 0;
      w->reading_count = 0, w->wgmma_groups = 0;
      memset(w->group_of_lane, 0, sizeof w->group_of_lane);
      EACH if (k->specials[0] >= 0) ((u32*)(w->regs + k->specials[0]))[l] = x * LANES + l;
      set_row(w, k->specials[1], b->ctaid);
      set_row(w, k->specials[2], threads);
      set_row(w, k->specials[3], blocks);
      set_row(w, k->specials[4], r);
      EACH if (k->specials[5] >= 0) ((u32*)(w->regs + k->specials[5]))[l] = l;
      set_row(w, k->specials[6], x);
      set_row(w, k->specials[7], b->ctaid % 4);
    }
  }
}

// Copies that nobody waits for by groups land some time; at the latest when all warps wait.
static int land_some(Cluster* c, int all) {
  int landed = 0;
  while (c->bulk_count && (all || next_random() % 4 == 0)) {
    const int k = next_random() % c->bulk_count;
    const Bulk b = c->bulks[k];
    c->bulks[k] = c->bulks[--c->bulk_count];
    machine.at = 0;
    land_one_bulk(machine.now, &b);
    landed = 1;
  }
  for (int r = 0; r < c->size; ++r)
    for (int x = 0; x < c->blocks[r].warp_count; ++x) {
      Warp* w = c->blocks[r].warps + x;
      if (w->done || !(all || next_random() % 4 == 0)) continue;
      u32 lanes = 0;  // that have a note: what they copied before it lands, and the note
      for (int k = w->copy_count - 1; k >= 0; --k) {
        if (w->copies[k].barrier) lanes |= 1u << w->copies[k].lane;
      }
      if (!lanes) continue;
      machine.now = w;
      u32 left[LANES] = {0};
      for (int k = 0; k < w->copy_count; ++k)
        if (w->copies[k].barrier) left[w->copies[k].lane] += 1;
      int kept = 0;
      for (int k = 0; k < w->copy_count; ++k) {
        const Copy copy = w->copies[k];
        if (left[copy.lane] == 0) {
          w->copies[kept++] = copy;
          continue;
        }
        if (copy.barrier) left[copy.lane] -= 1, barrier_arrive(copy.barrier, 1);
        else if (copy.zeros) memset(copy.to, 0, copy.bytes);
        else memcpy(copy.to, copy.from, copy.bytes);
      }
      w->copy_count = kept;
      landed = 1;
    }
  return landed;
}

// Runs every warp of a cluster for a while. True: something went on.
static int run_cluster(Cluster* c) {
  int moved = 0, warps = c->size * c->blocks[0].warp_count;
  const u32 shift = next_random();
  for (int k = 0; k < warps; ++k) {
    const int which = (k + shift) % warps;
    Block* b = c->blocks + which / c->blocks[0].warp_count;
    Warp* w = b->warps + which % b->warp_count;
    if (w->done || w->blocked) continue;
    machine.now = w;
    wake(w);
    if (run_warp(w, 1 + next_random() % (next_random() % 8 ? 400 : 8000))) moved = 1;
  }
  if (land_some(c, 0)) moved = 1;
  if (!moved && land_some(c, 1)) moved = 1;
  if (c->live_warps == 0) c->running = 0, moved = 1;
  return moved;
}

static Cluster* resident;
static int resident_count;
static void free_clusters(void) {
  for (int n = 0; n < resident_count; ++n) {
    for (int r = 0; r < resident[n].size; ++r) {
      Block* b = resident[n].blocks + r;
      for (int x = 0; x < b->warp_count; ++x) free(b->warps[x].regs), free(b->warps[x].copies), free(b->warps[x].local);
      free(b->warps), free(b->shared);
    }
    free(resident[n].blocks), free(resident[n].bulks);
  }
  free(resident);
  resident = 0, resident_count = 0;
}

// Runs a grid of `blocks` in clusters of `cluster`, so many `at_once`. 0, or 1: machine.message says why not.
int machine_launch(const Kernel* kernel, u32 blocks, u32 threads, u32 shared_bytes, u32 cluster, const u8* params,
                   u32 at_once) {
  machine.kernel = kernel, machine.now = 0, machine.together = 0, machine.at = 0, machine.executed = 0;
  memset(machine.last, 0, sizeof machine.last);
  const u32 mode = _mm_getcsr();
  if (setjmp(machine.failed)) {
    _mm_setcsr(mode);
    free_clusters();
    return 1;
  }
  if (blocks % cluster || threads % LANES) fail("%u blocks of %u threads in clusters of %u", blocks, threads, cluster);
  const u32 clusters = blocks / cluster;
  resident_count = at_once < clusters ? at_once : clusters;
  resident = calloc(resident_count, sizeof(Cluster));
  for (int n = 0; n < resident_count; ++n) {
    Cluster* c = resident + n;
    c->size = cluster;
    c->blocks = calloc(cluster, sizeof(Block));
    for (u32 r = 0; r < cluster; ++r) {
      Block* b = c->blocks + r;
      b->shared_bytes = shared_bytes;
      b->shared = aligned_alloc(1024, (shared_bytes + 2047) / 1024 * 1024);
      b->warp_count = threads / LANES;
      b->warps = calloc(b->warp_count, sizeof(Warp));
      for (int x = 0; x < b->warp_count; ++x) {
        Warp* w = b->warps + x;
        w->regs = aligned_alloc(64, (kernel->register_bytes + 63) / 64 * 64);
        memset(w->regs, 0xff, kernel->register_bytes);
        memcpy(w->regs + kernel->register_bytes - kernel->constant_bytes, kernel->constants, kernel->constant_bytes);
        if (kernel->param_row >= 0) EACH ((u64*)(w->regs + kernel->param_row))[l] = (u64)params;
        if (kernel->local_bytes) {
          w->local = aligned_alloc(64, (kernel->local_bytes * LANES + 63) / 64 * 64);
          EACH ((u64*)(w->regs + kernel->local_row))[l] = (u64)(w->local + l * kernel->local_bytes);
        }
      }
    }
  }
  _mm_setcsr(mode | 0x8040);  // denormal numbers are zeros, of operands and results
  u32 next = 0;
  int running, still = 0;  // rounds in which nothing went on; a warp that ends in a wait may have let others go on
  do {
    running = 0;
    int moved = 0;
    for (int n = 0; n < resident_count; ++n) {
      Cluster* c = resident + n;
      if (!c->running && next < clusters) start_cluster(c, next++, blocks, threads);
      if (!c->running) continue;
      running = 1;
      if (run_cluster(c)) moved = 1;
    }
    still = moved ? 0 : still + 1;
    if (running && still > 100) {
      for (int n = 0; n < resident_count; ++n)
        for (int r = 0; resident[n].running && r < resident[n].size; ++r)
          for (int x = 0; x < resident[n].blocks[r].warp_count; ++x) {
            Warp* w = resident[n].blocks[r].warps + x;
            if (!w->done) machine.now = w, machine.at = kernel->code + w->pc;
          }
      fail("nothing goes on any more: every warp waits");
    }
  } while (running);
  _mm_setcsr(mode);
  free_clusters();
  return 0;
}

void machine_ranges(const Range* ranges, s64 count) {
  free(machine.ranges);
  machine.ranges = malloc(count * sizeof(Range) + 1);
  memcpy(machine.ranges, ranges, count * sizeof(Range));
  machine.range_count = count;
}
void machine_settings(u64 seed, int late, u64 limit) {
  machine.random = seed * 0x9e3779b97f4a7c15ull + 0x1234567ull;
  machine.late = late, machine.limit = limit;
}
const char* machine_message(void) { return machine.message; }
u64 machine_executed(void) { return machine.executed; }
