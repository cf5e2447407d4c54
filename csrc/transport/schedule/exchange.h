// What a call moves, whatever collective it is: the memory that this rank exposes to its peers,
// what goes between that and theirs, and what is copied at home.
//
// An exchange that can be written as well as read can be carried in order of arrival: of every two
// ranks the later one does both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/call.h"

namespace pg_sdma {

// Memory within one allocation.
struct Region {
  const void* data = nullptr;
  size_t bytes = 0;
};

// Bytes that go between this rank and a peer: here, and from `offset` on in one of the regions that
// the peer exposes.
struct Block {
  char* here = nullptr;  // none where a Reducer says where they land
  size_t bytes = 0;
  size_t region = 0;
  size_t offset = 0;
};

struct Exchange {
  // What is copied from here to here.
  struct Own {
    const char* from = nullptr;
    char* to = nullptr;
  };

  std::vector<size_t> sizes;  // bytes of a block of each tensor, equal on all ranks
  std::vector<Region> exposed;
  std::vector<Own> own;  // one a tensor; none where nothing is copied
  // Of each rank a block a tensor, in the order of ranks; empty where the exchange is not read, or
  // not written, so. The own rank's are not used.
  std::vector<Block> reads;
  std::vector<Block> writes;

  bool any_order() const { return !reads.empty() && !writes.empty(); }
  const Block& read(int rank, size_t tensor) const { return reads[index(rank, tensor)]; }
  const Block& write(int rank, size_t tensor) const { return writes[index(rank, tensor)]; }

 private:
  size_t index(int rank, size_t tensor) const {
    return static_cast<size_t>(rank) * sizes.size() + tensor;
  }
};

// `pushes`: whether ranks write into their peers' outputs where they can.
Exchange exchange_of(const Call& call, int rank, int world, bool pushes);

}  // namespace pg_sdma
