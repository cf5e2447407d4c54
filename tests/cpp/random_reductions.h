// What a random reduce-scatter of random_gathers.h works on: memory with guards, and a sum of bytes
// that tells in which order they came.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "transport/call.h"

namespace stress {

// Of numbers of one byte: h = 31 h + x, so any other order, or a byte that was summed twice, shows.
inline unsigned char then(unsigned char sum, unsigned char next) {
  return static_cast<unsigned char>(31 * sum + next);
}

class ByteReducer final : public pg_sdma::Reducer {
 public:
  ByteReducer(int rank, int world, size_t room)
      : rank_(rank),
        room_(room),
        memory_(static_cast<size_t>(world) * room + pg_sdma::kMostElement) {}

  int landings() const override { return 1; }
  size_t room() const override { return room_; }
  void* landing(int, int peer) override {
    const auto base = reinterpret_cast<uintptr_t>(memory_.data());
    const size_t head = -base % pg_sdma::kMostElement;
    return memory_.data() + head + static_cast<size_t>(peer) * room_;
  }
  pg_sdma::Launch launch(const pg_sdma::Share& share, size_t offset, size_t bytes, int which,
                         size_t at) override {
    pg_sdma::Launch launch;
    launch.call = [this, &share, offset, bytes, which, at] {
      std::vector<const void*> slices;
      for (int r = 0; r < static_cast<int>(share.slices.size()); ++r) {
        slices.push_back(r == rank_ ? static_cast<const unsigned char*>(share.slices[r]) + offset
                                    : static_cast<const unsigned char*>(landing(which, r)) + at);
      }
      reduce(share, offset, bytes, slices);
    };
    return launch;
  }

 private:
  void reduce(const pg_sdma::Share& share, size_t offset, size_t bytes,
              const std::vector<const void*>& slices) {
    // No element is torn, and all of them lie where the processor wants them.
    if (offset % pg_sdma::kMostElement != 0) fail("a cut within an element");
    for (const void* slice : slices) {
      const auto* byte = static_cast<const unsigned char*>(slice);
      const bool landed = byte >= memory_.data() && byte < memory_.data() + memory_.size();
      if (landed && reinterpret_cast<uintptr_t>(byte) % pg_sdma::kMostElement != 0) {
        fail("an unaligned landing");
      }
    }
    auto* output = static_cast<unsigned char*>(share.output) + offset;
    for (size_t i = 0; i < bytes; ++i) {
      unsigned char sum = 0;
      for (const void* slice : slices) sum = then(sum, static_cast<const unsigned char*>(slice)[i]);
      output[i] = sum;
    }
  }

  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "reduce-scatter: %s\n", what);
    std::fflush(stderr);
    std::_Exit(1);
  }

  int rank_;
  size_t room_;
  std::vector<unsigned char> memory_;
};

// One tensor: a slice for every rank, and the output, with guards around them all.
struct Scattered {
  static constexpr size_t kGuard = 32;
  static constexpr unsigned char kPoison = 0xA5;

  Scattered(int world, int rank, size_t bytes, bool in_place, bool listed)
      : world(world),
        rank(rank),
        bytes(bytes),
        in_place(in_place),
        stride(bytes + (listed ? kGuard + 1 : 0)),
        input(stride * static_cast<size_t>(world) + 2 * kGuard, kPoison),
        own_output(in_place ? 0 : bytes + 2 * kGuard + 1, kPoison) {}

  unsigned char* slice(int of) { return input.data() + kGuard + stride * static_cast<size_t>(of); }
  unsigned char* output() { return in_place ? slice(rank) : own_output.data() + kGuard + 1; }

  pg_sdma::Share share(size_t index) {
    pg_sdma::Share share;
    share.tensor = index;
    share.bytes = bytes;
    for (int r = 0; r < world; ++r) share.slices.push_back(slice(r));
    share.output = output();
    return share;
  }

  // What the peers read may be anything once the operation is over.
  void scribble() {
    for (int r = 0; r < world; ++r) {
      if (r != rank || !in_place) std::memset(slice(r), 0x5A, bytes);
    }
  }

  // Whether the output holds `expected`, and nothing else was written.
  bool holds(const std::vector<unsigned char>& expected) {
    if (!std::equal(expected.begin(), expected.end(), output())) return false;
    const std::vector<unsigned char>& around = in_place ? input : own_output;
    const auto first = static_cast<size_t>(output() - around.data());
    for (size_t i = 0; i < kGuard; ++i) {
      if (!in_place && (around[first - 1 - i] != kPoison || around[first + bytes + i] != kPoison)) {
        return false;
      }
    }
    return input.front() == kPoison && input.back() == kPoison;
  }

  int world;
  int rank;
  size_t bytes;
  bool in_place;
  size_t stride;
  std::vector<unsigned char> input;
  std::vector<unsigned char> own_output;
};

}  // namespace stress
