#include "transport/slots.h"

#include <algorithm>

namespace pg_sdma {
namespace {

// Of shared memory that a group may have, with its control page. Between two fills of a slot a rank
// reads or writes about all of it: twice what a core's own cache holds, so that the slot has left
// the readers' caches, from where taking it back would be slower (docs/experiments.md).
constexpr size_t kMostShared = size_t{2} << 20;

// A wave costs each rank a handshake with every peer.
constexpr size_t kLeastSlot = size_t{16} << 10;

constexpr size_t kCount = 16;

constexpr size_t kAlignment = 64;  // a cache line

}  // namespace

SlotShape Slots::shape(int world, size_t page_bytes) {
  if (world < 2 || page_bytes >= kMostShared) return {};
  const size_t slots = static_cast<size_t>(world) * kCount;
  const size_t bytes = (kMostShared - page_bytes) / slots / kAlignment * kAlignment;
  if (bytes < kLeastSlot) return {};
  return {kCount, bytes};
}

bool Slots::hold(size_t shard) const { return shard <= lead_ * page_.slots().bytes; }

void Slots::write(const Call& call, Program& program) {
  const std::vector<Wave> waves = cut(call, page_.slots().bytes);
  size_t filled = 0;
  for (size_t emptied = 0; emptied < waves.size(); ++emptied) {
    for (; filled < std::min(waves.size(), emptied + lead_); ++filled) {
      fill(call, waves[filled], number_ + filled + 1, program);
    }
    empty(call, waves[emptied], number_ + emptied + 1, program);
  }
  number_ += waves.size();
}

void Slots::fill(const Call& call, const Wave& wave, uint64_t number, Program& program) {
  char* to = slot(rank_, number);
  for (const Part& part : wave) {
    const auto from = reinterpret_cast<uintptr_t>(call.pieces[part.tensor].input) + part.offset;
    program.push_back(Step::copy(to, 0, from, part.bytes));
    to += part.bytes;
  }
  program.push_back(Step::write(page_.filled(rank_), number));
  // Now that its peers can go on.
  for (const Part& part : wave) {
    const Piece& piece = call.pieces[part.tensor];
    auto* own = static_cast<char*>(piece.outputs[rank_]);
    if (own == piece.input) continue;
    const auto from = reinterpret_cast<uintptr_t>(piece.input) + part.offset;
    program.push_back(Step::copy(own + part.offset, 0, from, part.bytes));
  }
}

void Slots::empty(const Call& call, const Wave& wave, uint64_t number, Program& program) {
  for (int i = 1; i < world_; ++i) {
    const int peer = (rank_ + i) % world_;
    program.push_back(Step::wait(page_.filled(peer), number));
    const char* from = slot(peer, number);
    for (const Part& part : wave) {
      auto* to = static_cast<char*>(call.pieces[part.tensor].outputs[peer]) + part.offset;
      program.push_back(Step::copy(to, 0, reinterpret_cast<uintptr_t>(from), part.bytes));
      from += part.bytes;
    }
  }
}

char* Slots::slot(int rank, uint64_t number) const {
  return page_.slot(rank, number % page_.slots().count);
}

}  // namespace pg_sdma
