// Staging buffers of shared memory, through which ranks that copy on their own threads hand each
// other their shards. The kernel then looks up no pages of a peer's, which is half of what reading
// a peer's memory costs.
//
// A shard is cut into chunks, numbered from 1 over the group's life and cut alike on every rank.
// For chunk w a rank copies its bytes into its buffer w mod 2L, writes filled[r] = w, waits for
// filled[p] >= w of each peer p, and copies p's buffer to its output. It fills at most L chunks
// ahead of the one that it empties. So 2L buffers are enough, and the one counter:
//
//   who fills w has emptied w - L, so it has seen filled[p] >= w - L of every p;
//   p filled w - L after it had emptied w - 2L, which is what the buffer of w held before.
//
// A rank is through an operation once it has emptied its last chunk: its own bytes then lie in its
// buffers, where they stay until every peer has had them, and nobody reads its input any more.
//
// Between the first and the last chunk ranks wait for each other again and again. Where they do not
// all run at once, because other programs or the callers' own threads need the cores, it is faster
// to read the peers' memory. So a rank may ask for that in its record of the call.
//
// tests/cpp/explore_schedules.cpp runs the programs in random orders, also with each rule broken.
#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "transport/memory/control_page.h"
#include "transport/schedule/program_writer.h"

namespace pg_sdma {

class StagingBuffers {
 public:
  // L of a group whose page has enough buffers: more is slower (docs/experiments.md).
  static constexpr uint64_t kMostLead = 4;

  // The buffers for a group of `world` ranks whose page has `page_bytes` without them: none where
  // they would be too small.
  static SlotShape shape(int world, size_t page_bytes);

  // `lead`: L, at most half of the page's buffers.
  StagingBuffers(ControlPage& page, int rank, int world, uint64_t lead)
      : page_(page), rank_(rank), world_(world), lead_(lead) {}

  bool any() const { return page_.slots().count > 0; }
  // Whether a shard fits into L buffers. Then no rank has to wait longer than it would where it
  // reads its peers' memory: for a peer to come and, once, to run through.
  bool hold(size_t shard) const;
  // The program of an all-gather, which this rank must run to its end, or nothing after it.
  Program copies(ProgramWriter& write);

 private:
  void fill(const Chunk& chunk, uint64_t number, ProgramWriter& write);
  void empty(const Chunk& chunk, uint64_t number, ProgramWriter& write);
  char* buffer(int rank, uint64_t number) const;

  ControlPage& page_;
  const int rank_;
  const int world_;
  const uint64_t lead_;
  uint64_t number_ = 0;  // the last chunk of the calls so far
};

}  // namespace pg_sdma
