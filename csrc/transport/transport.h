// How a group does all-gathers and reduce-scatters without the inner. Knows ranks, bytes and
// addresses; knows no tensors and no c10d.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
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

// What peers read or write of this rank's memory: within one allocation.
struct Region {
  const void* data = nullptr;
  size_t bytes = 0;
};

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
  std::chrono::milliseconds timeout{0};

  bool reduces() const { return !reduction.empty(); }
  std::vector<uint64_t> shards() const;  // `whole`, or the bytes of each piece or share
  uint64_t shard_bytes() const;          // of an all-gather's pieces together
  // Of all ranks together: an all-gather's output, a reduce-scatter's input.
  uint64_t total_bytes() const;
  // What peers read. The i-th piece or share is the i-th region, with the slice for rank r at
  // r * bytes; where the slices are listed, the slice for rank r is region r.
  std::vector<Region> regions() const;
  // What peers write of an all-gather whose outputs are not listed: the i-th piece is the i-th
  // region, with the shard of rank r at r * bytes.
  std::vector<Region> targets() const;
};

// Sums what has landed. Used by one call at a time.
class Reducer {
 public:
  virtual ~Reducer() = default;
  // So many bytes of each peer's slices may land at a time: a multiple of kMostElement.
  virtual size_t room() const = 0;
  // Where they land: room() bytes for each peer, aligned to kMostElement.
  virtual void* landing(int peer) = 0;
  // Bytes [offset, offset + bytes) of every rank's slice are here, `slices` in rank order: writes
  // the same bytes of share.output, of which slices[own rank] may be the old contents. What is
  // reduced of a share at a time makes no difference to its result.
  virtual void reduce(const Share& share, size_t offset, size_t bytes,
                      const std::vector<const void*>& slices) = 0;
};

// Sums what has landed, with kernels on the device. There are several landings, so that some fill
// while others are summed. Used by one call at a time, and until that has ended on the device.
class StreamReducer {
 public:
  virtual ~StreamReducer() = default;
  virtual int landings() const = 0;
  // As Reducer's, of one landing.
  virtual size_t room() const = 0;
  virtual void* landing(int which, int peer) = 0;
  // What Reducer::reduce does, of peers' bytes that lie at `at` in the landing `which`.
  virtual Launch launch(const Share& share, size_t offset, size_t bytes, int which, size_t at) = 0;
};

// Which way one operation goes, the same on all ranks.
struct Decision {
  bool direct = false;
  std::string reason;  // when not direct
  std::string here;    // more of it, where it lies with this rank
};

// A call's arguments are bad, or contradict a peer's. The group stays usable.
class BadCall : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The group is broken: a peer is gone or too late, or the group was aborted. Sticky.
class GroupFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Calls on one transport are made one at a time, in the group's issue order.
class Transport {
 public:
  virtual ~Transport() = default;

  // Takes the group's next number for the call and agrees on its route with all ranks. Throws
  // BadCall on every rank when any rank's arguments are bad; throws GroupFault.
  virtual Decision agree(const Call& call) = 0;

  // Carries out the all-gather that agree() just called direct: on the calling thread, or enqueued
  // on queue() where the engine is stream-ordered.
  virtual void carry(const Call& call) = 0;

  // The same for a reduce-scatter. Of an engine whose programs run on the calling thread.
  virtual void reduce(const Call& call, Reducer& reducer) = 0;
  // The same where the engine is stream-ordered: enqueued on queue().
  virtual void reduce(const Call& call, StreamReducer& reducer) = 0;

  virtual Queue& queue() = 0;

  // Makes every wait of this process, present and future, throw GroupFault.
  virtual void abort(const std::string& why) = 0;
};

}  // namespace pg_sdma
