// An all-gather of somebody else's (mori's), which carries a group's direct all-gathers in place of
// copies between peers. Numbers, agreement, faults and the record of progress stay the transport's.
#pragma once

#include <memory>
#include <string>

#include "engine/engine.h"
#include "transport/call.h"

namespace pg_sdma {

class ExternalAllGather {
 public:
  virtual ~ExternalAllGather() = default;
  virtual std::string name() const = 0;

  // Enqueues the all-gather of `call` behind what `queue` holds, and what `queue` gets later behind
  // the all-gather; on a queue whose programs run on the calling thread, carries it out. Every rank
  // makes the same calls in the same order. Throws std::runtime_error.
  virtual void enqueue(const Call& call, Queue& queue) = 0;
};

// How one rank of a group comes by it.
class ExternalOffer {
 public:
  virtual ~ExternalOffer() = default;

  // Throws std::runtime_error with the reason why this rank cannot have one. What rank 0's returns,
  // one line, is for all ranks.
  virtual std::string prepare() = 0;

  // Once every rank is prepared; `word` is what rank 0's prepare() returned. May wait for all ranks
  // to come here. Throws std::runtime_error.
  virtual std::unique_ptr<ExternalAllGather> join(const std::string& word) = 0;
};

}  // namespace pg_sdma
