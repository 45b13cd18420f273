// The producer of pass 2 on Hopper: one warpgroup, or of TwoBlockTraits two warps, that takes q tiles and brings rows
// of q, k and v to shared memory, gathered or by boxes.
#pragma once
#include "sm90/boxes.cuh"
#include "sm90/gathered_rows.cuh"
#include "sm90/q_tiles.cuh"

namespace s2o {
namespace sm90 {

// Takes the next q tile early, as the counter's answer takes a while; one thread.
template <class Rows, class Params, class Shared>
__device__ __forceinline__ void take_next(const Params& params, Shared& shared) {
  const int q_tile = next_q_tile<Rows>(params);
  shared.next.q_tile = q_tile;
  if (q_tile < 0) return;
  const Rows rows(params, q_tile);
  shared.next.q_order = rows.tile_order();
  shared.next.k_order = rows.key_order(params);
  shared.next.begin = rows.begin;
  shared.next.keys = rows.keys(params.geometry);
  shared.next.rows = rows.count;
  shared.next.tau = params.tau_of(rows.head, shared.next.keys);
  shared.next.least_keys = rows.least_keys(params);
}

// Tells the block its q tile number `n`, which take_next has taken.
template <class Shared>
__device__ __forceinline__ void publish_next(Shared& shared, uint32 n) {
  publish<2>(shared, n, shared.next.q_tile, [&](uint32 place) {
    shared.tau[place] = shared.next.tau;
    shared.least_keys[place] = shared.next.least_keys;
    shared.patience[place] = patience(shared.next.keys, kStopCheckKeys);
  });
}

// body(0), body(1), ..., kTimes of them. A loop of one turn gave other machine code than its body alone.
template <int kTimes, class Body>
__device__ __forceinline__ void each(const Body& body) {
  if constexpr (kTimes > 1) each<kTimes - 1>(body);
  body(kTimes - 1);
}

// Looks up the next q tile's rows and first keys early: nobody knows when this one will stop, and a lookup takes as
// long as the copy it serves. `row`: the first one this thread keeps; `key_row`: of a tile of keys, kKeyRows of them.
template <class Traits, class Rows, int kKeyRows, class Params>
__device__ __forceinline__ void look_up_next(const Params& params, typename Traits::Shared& shared, int row,
                                             int key_row) {
  using Layout = CopyLayout<Traits>;
  named_sync(kNext, Traits::kProducerThreads);  // take_next is done
  if (shared.next.q_tile >= 0) {
    const int thread = threadIdx.x % kWarpgroup;  // of the producer
    const auto look_up_row = [&](int kept, int& to) {
      const bool present = Rows::of_head(kept) < shared.next.rows;
      to = present ? shared.next.begin + Rows::query(params.geometry, shared.next.q_order, kept) : -1;
    };
    const auto look_up_unit = [&](int kept, int& to) {
      to = kept < shared.next.keys ? Rows::unit(params, shared.next.k_order, kept) : -1;
    };
    each<Layout::kKeptOfQueries>([&](int i) {
      look_up_row(row + i * Layout::kKeptRows, shared.next.row[thread + i * Traits::kProducerThreads]);
    });
    each<kKeyRows>([&](int i) {
      look_up_unit(key_row + i * Layout::kKeptRows, shared.next.unit[thread + i * Traits::kProducerThreads]);
    });
  }
  // Everybody has read what the next take_next writes: a q tile may be that short.
  named_sync(kNext, Traits::kProducerThreads);
}

// `maps`: MappedUnits, where rows come by boxes (Traits::kByBoxes).
template <class Traits, class Rows, class Params, class Maps>
__device__ __forceinline__ void produce_second(const Params& params, typename Traits::Shared& shared,
                                                     const Maps& maps) {
  constexpr bool kByBoxes = Traits::kByBoxes;
  constexpr int kStages = Traits::kStages, kBlockN = Traits::kBlockN, kTilesPerStopCheck = Traits::kTilesPerStopCheck;
  constexpr int kQueryPlaces = Traits::kQueryPlaces, kBlockM = Traits::kBlockM;
  constexpr bool kPaged = Traits::kPaged;
  // Whether the list of keys may end within a box, whose other keys then must not count.
  constexpr bool kMayCut = kByBoxes && (Rows::kListed || kPaged);
  // Of a ladder there are few q tiles, and the longest come first: whoever takes two at a time has the longest twice.
  constexpr bool kTakesLate = kWalksLadder<Traits>;
  const Geometry& g = params.geometry;
  const Pages& pages = params.pages;
  using Layout = CopyLayout<Traits>;
  // Rows that a thread looks up: of queries, and of a tile of keys.
  constexpr int kFirst = Traits::kFirstProducer, kThreads = Traits::kProducerThreads;
  constexpr int kQueryRows = Layout::kKeptOfQueries, kKeptRows = Layout::kKeptRows;
  constexpr int kKeyRows = kByBoxes ? 1 : Layout::kKeptOfKeys;
  const Layout layout(g.head_dim);
  const int row = layout.kept_row(), thread = threadIdx.x % kWarpgroup;
  const int key_row = kByBoxes ? BoxCopies<Traits>::kept_row() : row;
  constexpr int kRows = kBlockM / Rows::kHeads;  // of a head
  const RowUnits<false> q_units(pages, params.q);
  const RowUnits<kPaged> k_units(pages, params.k), v_units(pages, params.v);
  const auto query_units = [&](int query, int kept) {
    if constexpr (Rows::kHeads > 1) {
      auto q = params.q;
      asm volatile("" : "+l"(q.row), "+l"(q.head));
      const uint32 units = RowUnits<false>(pages, q)(query);
      return units == kNoRow ? kNoRow : units + kept / kRows * static_cast<uint32>(q.head / 8);
    } else if constexpr (Rows::kListed || (kPaged && Traits::kHeadDim > 128)) {  // registers do not suffice to keep them
      auto q = params.q;
      asm volatile("" : "+l"(q.row));
      return RowUnits<false>(pages, q)(query);
    } else {
      return q_units(query);
    }
  };
  const auto value_units = [&](int slot) {
    if constexpr (kPaged && (kSkipsValues<Traits> || Traits::kHeadDim > 128)) {  // likewise
      auto v = params.v;
      asm volatile("" : "+l"(v.row));
      return RowUnits<kPaged>(pages, v)(slot);
    } else {
      return v_units(slot);
    }
  };
  if (thread == 0) {
    take_next<Rows>(params, shared);
    publish_next(shared, 0);
  }
  Ring<kStages> k_ring, v_ring;
  uint32 voted = 0;  // stop checks of the q tiles before this one
  for (uint32 nth = 0;; ++nth) {
    const uint32 slot = nth % kQueryPlaces, nth_parity = nth / kQueryPlaces & 1, place = nth % kPlaces;
    await_q_tile(shared, nth);
    const int q_tile = shared.q_tile[place];
    barrier_arrive(shared.q_tile_empty[place]);
    if (q_tile < 0) return;

    const Rows rows(params, q_tile);
    const int batch = rows.batch(params.heads), kv_head = rows.kv_head(params.heads, params.kv_heads);
    [[maybe_unused]] const int table_row = rows.table_row(params.heads);
    const uint16 *k = head_rows<kPaged>(params.k, batch, kv_head), *v = head_rows<kPaged>(params.v, batch, kv_head);
    const int count = rows.keys(g), tiles = (count + kBlockN - 1) / kBlockN;
    const int* order = rows.key_order(params);
    // Of this thread's key number i of a tile: its unit, a load that is waited for by who asks for the key.
    const auto unit = [&](int tile, int i) {
      const int nth_key = tile * kBlockN + key_row + i * kKeptRows;
      return nth_key < count ? Rows::unit(params, order, nth_key) : -1;
    };
    const auto key = [&](int unit, int tile, int i) {
      return Rows::key(params, unit, tile * kBlockN + key_row + i * kKeptRows);
    };

    int position[kQueryRows], ahead[kKeyRows];  // ahead: the next units, on their way
    each<kQueryRows>([&](int i) {
      position[i] = nth == 0 ? rows(row + i * kKeptRows) : shared.next.row[threadIdx.x - kFirst + i * kThreads];
    });
    each<kKeyRows>([&](int i) {
      ahead[i] = nth == 0 ? unit(0, i) : shared.next.unit[threadIdx.x - kFirst + i * kThreads];
    });
    uint32 k_row[kKeyRows], v_row[kKeyRows];
    each<kKeyRows>([&](int i) { v_row[i] = kNoRow; });
    // kPaged: the keys before those units', and their pages, on their way too
    [[maybe_unused]] int paged_key[kKeyRows], page[kKeyRows];
    const auto look_up_page = [&](int tile) {
      each<kKeyRows>([&](int i) { paged_key[i] = key(ahead[i], tile, i); });
      int table = table_row;
      if constexpr (kSkipsValues<Traits> || Traits::kHeadDim > 128)
        asm volatile("" : "+r"(table));  // registers do not suffice to keep its address
      each<kKeyRows>([&](int i) {
        page[i] = pages.page(pages.of(table), paged_key[i]);
        ahead[i] = unit(tile + 1, i);
      });
    };
    if constexpr (kPaged) look_up_page(0);
    // Where the box of `x` begins whose first row is `row`: a slot of a paged cache, or a position.
    const auto box_at = [&](auto x, int row) {
      if constexpr (!kPaged) return BoxAt{row, kv_head, batch};
      asm volatile("" : "+l"(x.batch), "+l"(x.head));  // registers do not suffice to keep what follows from these
      return HeadsOfPages(x).box(pages, row, kv_head);
    };
    const bool whole_rows = g.head_dim == Traits::kHeadDim;
    const auto full = [&](int tile) { return whole_rows && (tile + 1) * kBlockN <= count; };
    int tile = 0;
    // If all vote to stop at a stop check, the key tiles up to the next one are the last. The producer reads the votes
    // kStages tiles after those, when their copies have been used for sure; past the end of the list it reads them to
    // know whether consumers stopped before it.
    constexpr int kPastEnd = kStages - 2;
    for (; tile <= tiles + kPastEnd; ++tile) {
      const bool at_stop_check =
          tile > kStages + 2 * (kTilesPerStopCheck - 1) && (tile - kStages + 1) % kTilesPerStopCheck == 0;
      if (at_stop_check && all_voted_to_stop<Traits>(shared, voted + (tile - kStages + 1) / kTilesPerStopCheck - 2)) break;
      if (tile > tiles) continue;
      uint32 v_before[kKeyRows];
      each<kKeyRows>([&](int i) { v_before[i] = v_row[i]; });
      if (tile < tiles) {
        each<kKeyRows>([&](int i) {
          const int now = kPaged ? pages.slot_in(page[i], paged_key[i]) : key(ahead[i], tile, i);
          if constexpr (kByBoxes) {
            k_row[i] = v_row[i] = now < 0 && !kPaged ? kPastRows : now;
          } else {
            uint32 of_keys = k_units(now), of_values = value_units(now);
            asm volatile("" : "+r"(of_keys), "+r"(of_values));  // before the wait, not after it
            k_row[i] = of_keys;
            v_row[i] = of_values;
          }
          if (!kPaged && tile + 1 < tiles) ahead[i] = unit(tile + 1, i);
        });
        barrier_wait(shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
        if constexpr (kByBoxes) {
          BoxCopies<Traits>::bring(shared.k[k_ring.slot], maps.k, shared.k_full[k_ring.slot],
                                   box_at(params.k, k_row[0]));
        } else {
          layout.gather_keys(shared_address(shared.k[k_ring.slot]), k, k_row, full(tile));
          barrier_arrive_after_copies(shared.k_full[k_ring.slot]);
        }
        k_ring.advance();
        if constexpr (kPaged) look_up_page(tile + 1);
      }
      if (tile == 0) {
        barrier_wait(shared.q_empty[slot], nth_parity ^ 1);
        each<kQueryRows>([&](int i) {
          if (kBlockM % kKeptRows == 0 || row < kBlockM) shared.rows[nth % 2][row + i * kKeptRows] = position[i];
        });
        if constexpr (kByBoxes) {
          const int head = rows.head_in_batch(params.heads), first = rows.first_query();
          if (threadIdx.x == kFirst) {
            barrier_expect(shared.q_full[slot], sizeof(shared.q[0]));
            for (int i = 0; i < Rows::kHeads * (Traits::kHeadDim / 64); ++i) {
              const int nth_head = i % Rows::kHeads, columns = i / Rows::kHeads;
              copy_box(shared_address(shared.q[slot]) + columns * Traits::kQueryAtom + nth_head * kRows * 128, maps.q,
                       shared.q_full[slot], columns * 64, first, head + nth_head, batch);
            }
          } else {
            barrier_arrive(shared.q_full[slot]);
          }
          if (Traits::kBringsOutputs && Rows::resumes(params)) {
            barrier_wait(shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
            BoxCopies<Traits>::bring(shared.v[v_ring.slot], maps.out, shared.v_full[v_ring.slot],
                                     {first + Rows::of_head(key_row), head + key_row / kRows, batch});
            v_ring.advance();
          }
        } else {
          const uint16* queries = params.q.at(batch, rows.head_in_batch(params.heads));
          uint32 q_row[kQueryRows];
          each<kQueryRows>([&](int i) { q_row[i] = query_units(position[i], row + i * kKeptRows); });
          layout.gather_queries(shared_address(shared.q[slot]), queries, q_row, whole_rows && rows.count == kRows);
          barrier_arrive_after_copies(shared.q_full[slot]);
          barrier_arrive(shared.q_full[slot]);
        }
        if (!kTakesLate && threadIdx.x == kFirst) take_next<Rows>(params, shared);
        if (Rows::kListed && tiles == 0) look_up_next<Traits, Rows, kKeyRows>(params, shared, row, key_row);
      } else {
        barrier_wait(shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
        if constexpr (kByBoxes) {
          const BoxAt at = box_at(params.v, v_before[0]);
          if (kMayCut && tile * kBlockN > count && count % Traits::kBoxKeys != 0) {
            auto values = params.v;
            asm volatile("" : "+l"(values.row), "+l"(values.head), "+l"(values.batch));  // registers do not suffice to keep them
            const auto rows_of_box = [&] {
              const int64 before = kPaged ? pages.offset(values, v_before[0]) : v_before[0] * values.row;
              return head_rows<kPaged>(values, batch, kv_head) + before;
            };
            BoxCopies<Traits>::bring_cut(shared.v[v_ring.slot], maps.v, shared.v_full[v_ring.slot], at,
                                         count - (tile - 1) * kBlockN - key_row, rows_of_box, values.row);
          } else {
            BoxCopies<Traits>::bring(shared.v[v_ring.slot], maps.v, shared.v_full[v_ring.slot], at);
          }
        } else {
          layout.gather_keys(shared_address(shared.v[v_ring.slot]), v, v_before, full(tile - 1));
          barrier_arrive_after_copies(shared.v_full[v_ring.slot]);
        }
        v_ring.advance();
        if (!kTakesLate && tile == 1) look_up_next<Traits, Rows, kKeyRows>(params, shared, row, key_row);
      }
    }
    const int stop_checks =
        (tile > tiles + kPastEnd ? tiles + kTilesPerStopCheck - 1 : tile - kStages + 1) / kTilesPerStopCheck;
    voted += stop_checks;
    if constexpr (kAddsTail<Traits>) {
      const int visited = stop_checks * kStopCheckKeys, left = count - visited;
      if (left > 0) {
        // Samples of even number are one tile and those of odd number another, or each half of one.
        const int samples = tail_samples(left);
        const bool one_tile = samples == kBlockN;
        const auto slot_of_sample = [&](int n) {  // or position
          const int i = visited + sample_place(n, samples, left);
          const int sample = Rows::key(params, Rows::unit(params, order, i), i);
          if constexpr (kPaged) return pages.slot(pages.of(table_row), sample);
          return sample;
        };
        const int first = one_tile ? row % (kBlockN / 2) * 2 + row / (kBlockN / 2) : 2 * row;
        const int slots[2] = {slot_of_sample(first), one_tile ? 0 : slot_of_sample(first + 1)};
        const int64 moments = moments_of(params, rows);
        if (row < Traits::kHeadDim)
          cp_async_4(shared_address(shared.mean_values + row), params.mean_values + moments * Traits::kHeadDim + row);
        // There is room for the first tile of keys and of values at once, and for the others when the walk has ended. By
        // boxes each warp reports that a copy has landed once it has asked for the next.
        uint64* landing = nullptr;
        if (Traits::kBringsOutputs && Rows::resumes(params)) barrier_wait(shared.outputs_read, nth & 1);
        const auto report = [&](uint64* next) {
          if constexpr (kByBoxes) {
            cp_async_commit();
            if (landing != nullptr) {
              if (next != nullptr) {
                cp_async_wait<1>();
              } else {
                cp_async_wait<0>();
              }
              fence_for_wgmma();
              __syncwarp();
              if (threadIdx.x % 32 == 0) barrier_arrive(*landing);
            }
            landing = next;
          } else if (next != nullptr) {
            barrier_arrive_after_copies(*next);
          }
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (half == 1 && one_tile) break;
          barrier_wait(shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
          layout.gather_keys(shared_address(shared.k[k_ring.slot]), k, k_units(slots[half]), whole_rows);
          report(&shared.k_full[k_ring.slot]);
          k_ring.advance();
          barrier_wait(shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
          layout.gather_keys(shared_address(shared.v[v_ring.slot]), v, value_units(slots[half]), whole_rows);
          report(&shared.v_full[v_ring.slot]);
          v_ring.advance();
        }
        report(nullptr);
        barrier_wait(shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
        if constexpr (kByBoxes) {
          const int r = BoxCopies<Traits>::kept_row();
          BoxCopies<Traits>::bring(shared.k[k_ring.slot], maps.covariances, shared.k_full[k_ring.slot],
                                   {r < Traits::kHeadDim ? static_cast<int>(moments) * Traits::kHeadDim + r : kPastRows,
                                    0, 0});
        } else {
          layout.gather_keys(
              shared_address(shared.k[k_ring.slot]),
              params.covariances + moments * (Traits::kHeadDim * Traits::kHeadDim),
              row < Traits::kHeadDim ? row * (Traits::kHeadDim / 8) : kNoRow, Traits::kHeadDim == kBlockN && whole_rows);
          barrier_arrive_after_copies(shared.k_full[k_ring.slot]);
        }
        k_ring.advance();
      }
    }
    if (kTakesLate) {
      if (threadIdx.x == kFirst) take_next<Rows>(params, shared);
      look_up_next<Traits, Rows, kKeyRows>(params, shared, row, key_row);
    }
    // Rows of the q tile before this one are read until it is done, and there is room for two.
    if (threadIdx.x == kFirst) publish_next(shared, nth + 1);
  }
}

}  // namespace sm90
}  // namespace s2o
