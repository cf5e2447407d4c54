// The chain keeps the collectives of one lane in issue order, whichever routes, streams and threads
// they use. All calls but the last two are made under the lane's mutex.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/collectives/collective.h"

namespace pg_sdma {

// What a numbered call needs from its lane.
class Carrier {
 public:
  virtual ~Carrier() = default;
  // Agrees on the route of the call and carries it, through the chain's hooks; votes first where
  // the group has not. What went to the inner and has yet to complete is returned. Throws BadCall,
  // GroupFault.
  virtual std::vector<WorkPtr> carry(Collective& collective) = 0;
};

class Chain {
 public:
  using Body = std::function<WorkPtr()>;

  virtual ~Chain() = default;

  // Whether asynchronous calls are carried out by a thread of the chain's, which may block.
  virtual bool has_worker() const { return false; }
  // True while collectives of this rank have yet to be issued: later ones must queue.
  virtual bool busy() { return false; }
  // Issues the collective in `body` in its turn; the Work stands for the one that body returns.
  virtual WorkPtr enqueue(Body body) = 0;

  // Around an inner collective that is issued now.
  virtual void before_inner() = 0;
  virtual void after_inner(const WorkPtr& work) = 0;

  // Before the transport carries a call on `queue`, which is always the same.
  virtual void before_direct(Queue& queue) = 0;

  // A call that the static rule has passed, or will be asked about in its turn. Synchronous:
  // done, or ordered before the caller's stream, on return (null). Asynchronous: a Work.
  virtual WorkPtr run(std::shared_ptr<Collective> collective, Carrier& carrier) = 0;

  // Fails what waits, now and later, with GroupFault. From any thread, without the lane's mutex.
  virtual void abandon(const std::string&) {}

  // Whether nothing is pending any more; waits for that, at most so long. Without the lane's mutex.
  virtual bool await_idle(std::chrono::milliseconds) { return true; }
  // Ends the worker, once nothing is pending. Idempotent. Without the lane's mutex. Where
  // `process_ends`, what was pending keeps its tensors for ever: a thread of the inner's may let go
  // of them after Python has finalised, and must not be the last that does.
  virtual void stop(bool process_ends) = 0;

  // The transport has ended, after stop(): forgets it. Tensors that are still being copied to or
  // from, as by a peer that is late, are kept for ever, the others dropped. With the lane's mutex.
  virtual void let_go() {}
};

// What an operation of the inner completes. Null for gloo's reduce-scatters: it is their wait()
// that writes the output, at each call, so waiting is left to whom the Work was given.
inline c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

std::unique_ptr<Chain> make_host_chain();
std::unique_ptr<Chain> make_stream_chain(c10::DeviceType device);

}  // namespace pg_sdma
