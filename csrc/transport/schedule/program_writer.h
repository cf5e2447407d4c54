// The words of every schedule: steps of one rank's program for one operation.
//
//   ready[r] = k  peers may access what rank r exposes in operation k
//   done[r] = k   rank r accesses nobody's memory any more for operation k
//
// Schedules know no clock and wait for nothing: they write down what an engine will do.
// tests/cpp/explore_schedules.cpp runs those of all ranks in random orders, each rule broken in
// turn.
#pragma once

#include <utility>

#include "transport/memory/control_page.h"
#include "transport/operation.h"
#include "transport/schedule/chunks.h"

namespace pg_sdma {

class ProgramWriter {
 public:
  ProgramWriter(ControlPage& page, int rank, int world, const Operation& operation)
      : page_(page), rank_(rank), world_(world), operation_(operation) {
    program_.reserve(kUsual);
  }

  void tell_ready();
  void tell_done();
  // Until `peer` is ready.
  void await_ready(int peer, uint32_t track = 0);
  // Until all peers are done. Then this rank's memory is its own again.
  void await_all_done();

  void copy_own(const Chunk& parts, uint32_t track = 0);
  void read(int peer, const Chunk& parts, uint32_t track = 0);
  void write(int peer, const Chunk& parts, uint32_t track = 0);
  // Reads into a receive buffer.
  void receive(int peer, const Chunk& parts, void* into);

  void add(const Step& step) { program_.push_back(step); }
  // The i-th peer from this rank on, 1 <= i < world. Starting at the next rank spreads the load: no
  // two ranks begin at the same peer.
  int peer(int i) const { return (rank_ + i) % world_; }
  int world() const { return world_; }
  const Operation& operation() const { return operation_; }
  // The program so far, of which none is left here.
  Program take() { return std::exchange(program_, {}); }

 private:
  static constexpr size_t kUsual = 8;  // steps, for which one allocation is enough

  void read_part(int peer, const Part& part, char* to, uint32_t track);

  ControlPage& page_;
  const int rank_;
  const int world_;
  const Operation& operation_;
  Program program_;
};

}  // namespace pg_sdma
