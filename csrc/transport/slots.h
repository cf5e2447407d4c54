// Slots of shared memory through which ranks that copy on their own threads hand each other their
// shards. The kernel then looks up no pages of a peer's, which is half of what a pull costs.
//
// A shard is cut into waves, numbered from 1 over the group's life and cut alike on every rank. For
// wave w a rank copies its bytes into its slot w mod 2L, writes filled[r] = w, waits for
// filled[p] >= w of each peer p, and copies p's slot to its output. It fills at most L waves ahead
// of the one that it empties. That makes 2L slots enough, and the one counter:
//
//   who fills w has emptied w - L, so it has seen filled[p] >= w - L of every p;
//   p filled w - L after it had emptied w - 2L, which is what the slot of w held before.
//
// A rank is through an operation once it has emptied its last wave: its own bytes then lie in its
// slots, where they stay until every peer has had them, and nobody reads its input any more.
//
// Between the first and the last wave ranks wait for each other again and again. Where they do not
// all run at once, because other programs or the callers' own threads need the cores, a pull is
// faster, which needs no peer. So a rank may ask for one in its record of the call, and all pull.
//
// tests/cpp/explore_slots.cpp runs the programs in random orders, also with each rule broken.
#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "transport/control_page.h"
#include "transport/transport.h"
#include "transport/waves.h"

namespace pg_sdma {

class Slots {
 public:
  // L of a group whose page has enough slots: more is slower (docs/experiments.md).
  static constexpr uint64_t kMostLead = 4;

  // The slots for a group of `world` ranks whose page has `page_bytes` without them: none where
  // they would be too small.
  static SlotShape shape(int world, size_t page_bytes);

  // `lead`: L, at most half of the page's slots.
  Slots(ControlPage& page, int rank, int world, uint64_t lead)
      : page_(page), rank_(rank), world_(world), lead_(lead) {}

  bool any() const { return page_.slots().count > 0; }
  // Whether a shard fits into L slots. Then no rank has to wait longer than it would where it
  // pulls: for a peer to come and, once, to run through.
  bool hold(size_t shard) const;
  // Adds the copies of an all-gather to `program`, which this rank must run to its end, or nothing
  // after it.
  void write(const Call& call, Program& program);

 private:
  void fill(const Call& call, const Wave& wave, uint64_t number, Program& program);
  void empty(const Call& call, const Wave& wave, uint64_t number, Program& program);
  char* slot(int rank, uint64_t number) const;

  ControlPage& page_;
  const int rank_;
  const int world_;
  const uint64_t lead_;
  uint64_t number_ = 0;  // the last wave of the calls so far
};

}  // namespace pg_sdma
