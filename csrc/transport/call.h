// One call of one rank, as the transport takes it: bytes and addresses, no tensors.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace pg_sdma {

// One tensor of an all-gather: the own shard, and where the shard of every rank goes.
struct Piece {
  const void* input = nullptr;
  size_t bytes = 0;            // of one shard
  std::vector<void*> outputs;  // one a rank, `bytes` each, one behind the other unless listed
};

// One tensor of a reduce-scatter: what every rank takes of the own input, and the own sum.
struct Share {
  size_t tensor = 0;                // its index in the user's call
  std::vector<const void*> slices;  // one a rank, `bytes` each, one behind the other unless listed
  size_t bytes = 0;        // a whole number of elements, each of at most kMostElement bytes
  void* output = nullptr;  // `bytes`; it may be the own slice
};
constexpr size_t kMostElement = 16;

// One call of this rank: an all-gather's pieces, or a reduce-scatter's shares.
struct Call {
  std::string operation;  // the name users know it by
  std::string dtype;
  std::string reduction;  // of a reduce-scatter, in words: every rank's must be the same
  std::vector<Piece> pieces;
  std::vector<Share> shares;
  // The outputs, or slices, are tensors of their own: one piece or share, of a reduce-scatter at
  // most kMaxTensors ranks. Otherwise they lie one behind the other.
  bool listed = false;
  // Where this is part of a longer call: bytes of a shard or slice of each tensor of all of it.
  std::vector<uint64_t> whole;
  std::string invalid;      // why the arguments are bad; empty when they are good
  std::string unable;       // why this rank cannot carry the call; empty when it can
  bool overlapped = false;  // the caller computes meanwhile, and may need this core for it
  // Of the self-test: a failure is the caller's to tell, and breaks no group.
  bool trial = false;
  std::chrono::milliseconds timeout{0};

  bool reduces() const { return !reduction.empty(); }
  std::vector<uint64_t> shards() const;  // `whole`, or the bytes of each piece or share
  uint64_t shard_bytes() const;          // of an all-gather's pieces together
  // Of all ranks together: an all-gather's output, a reduce-scatter's input.
  uint64_t total_bytes() const;
};

// Receives slices of peers and sums them: on the calling thread, or with kernels where the engine
// is stream-ordered. Used by one call at a time, and until that has ended on the device.
class Reducer {
 public:
  virtual ~Reducer() = default;
  // Receive buffers: several, where some can fill while others are summed.
  virtual int landings() const = 0;
  // Bytes of each peer's slices that one receive buffer holds: a multiple of kMostElement.
  virtual size_t room() const = 0;
  // Where they land: room() bytes for each peer, aligned to kMostElement.
  virtual void* landing(int which, int peer) = 0;
  // Sums bytes [offset, offset + bytes) of every rank's slice of `share`, which outlives the
  // launch: the peers' lie at `at` in their places of the receive buffer `which`, and the own may
  // be where the sum goes. What is summed of a share at a time makes no difference to its result.
  virtual Launch launch(const Share& share, size_t offset, size_t bytes, int which, size_t at) = 0;
};

}  // namespace pg_sdma
