// How a group does an all-gather without the inner. Knows ranks, bytes and addresses; knows no
// tensors and no c10d.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace pg_sdma {

// One tensor of a call: the own shard, and where the shard of every rank goes.
struct Piece {
  const void* input = nullptr;
  size_t bytes = 0;            // of one shard
  std::vector<void*> outputs;  // one a rank, `bytes` each
};

// One all-gather call of this rank.
struct Call {
  std::string operation;  // the name users know it by
  std::string dtype;
  std::vector<Piece> pieces;
  // Where this is part of a longer call: bytes of a shard of each tensor of all of it.
  std::vector<uint64_t> whole;
  std::string invalid;  // why the arguments are bad; empty when they are good
  std::chrono::milliseconds timeout{0};

  std::vector<uint64_t> shards() const;  // `whole`, or the bytes of each piece
  uint64_t output_bytes() const;         // of all pieces
};

// Which way one operation goes, the same on all ranks.
struct Decision {
  bool direct = false;
  std::string reason;  // when not direct
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

  // Carries out the call that agree() just called direct: on the calling thread, or enqueued on
  // queue() where the engine is stream-ordered.
  virtual void carry(const Call& call) = 0;

  virtual Queue& queue() = 0;

  // Makes every wait of this process, present and future, throw GroupFault.
  virtual void abort(const std::string& why) = 0;
};

}  // namespace pg_sdma
