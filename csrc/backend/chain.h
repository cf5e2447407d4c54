// The chain keeps the collectives of one lane in issue order, whichever routes, streams and threads
// they use. All calls are made under the lane's mutex.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>

#include "backend/gather.h"

namespace pg_sdma {

// What a numbered gather needs from its lane.
class Carrier {
 public:
  virtual ~Carrier() = default;
  // Agrees on the route of the gather and carries it, through the chain's hooks. What went to the
  // inner and has yet to complete is returned. Throws BadCall, GroupFault.
  virtual std::vector<WorkPtr> carry(Gather& gather) = 0;
  virtual Transport& transport() = 0;
};

class Chain {
 public:
  using Body = std::function<WorkPtr()>;

  virtual ~Chain() = default;

  // True while collectives of this rank have yet to be issued: later ones must be deferred.
  virtual bool defers() { return false; }
  // Issues the collective in `body` in its turn; the Work stands for the one that body returns.
  virtual WorkPtr defer(Body body) = 0;

  // Around an inner collective that is issued now.
  virtual void before_inner() = 0;
  virtual void after_inner(const WorkPtr& work) = 0;

  // Before the transport carries a gather.
  virtual void before_direct(Transport& transport) = 0;

  // A gather that passed the static rule. Synchronous: done, or ordered before the caller's
  // stream, on return (null). Asynchronous: a Work.
  virtual WorkPtr gather(std::shared_ptr<Gather> gather, Carrier& carrier) = 0;

  // Ends what is pending: lets it complete for a moment, then gives it up. Idempotent.
  virtual void stop(const std::function<void()>& give_up) = 0;
};

std::unique_ptr<Chain> make_host_chain();
std::unique_ptr<Chain> make_stream_chain(c10::DeviceType device);

}  // namespace pg_sdma
