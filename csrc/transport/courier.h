// An all-gather of somebody else's (mori's), which a group's direct calls go through in place of
// peer copies. Numbers, agreement, faults and the record of progress stay the transport's.
#pragma once

#include <memory>
#include <string>

#include "engine/engine.h"
#include "transport/transport.h"

namespace pg_sdma {

class Courier {
 public:
  virtual ~Courier() = default;
  virtual std::string name() const = 0;

  // Enqueues the all-gather of `call` behind what `queue` holds, and what `queue` gets later behind
  // the all-gather; on a queue whose programs run on the calling thread, carries it out. Every rank
  // makes the same calls in the same order. Throws std::runtime_error.
  virtual void carry(const Call& call, Queue& queue) = 0;
};

// How one rank of a group comes by its courier.
class CourierOffer {
 public:
  virtual ~CourierOffer() = default;

  // Throws std::runtime_error with the reason why this rank cannot have one. What rank 0's returns,
  // one line, is for all ranks.
  virtual std::string prepare() = 0;

  // Once every rank is prepared; `word` is what rank 0's prepare() returned. May wait for all ranks
  // to come here. Throws std::runtime_error.
  virtual std::unique_ptr<Courier> join(const std::string& word) = 0;
};

}  // namespace pg_sdma
