// The Work of a collective that a host chain's worker thread carries out.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/order/tellers.h"

namespace pg_sdma {

class HostWork final : public c10d::Work {
 public:
  // Carries the collective out. Returns the Work of the inner that did it, complete, or null.
  using Body = std::function<c10::intrusive_ptr<c10d::Work>()>;

  // What keeps tensors alive.
  struct Kept {
    Body body;
    c10::IValue results;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  // Takes what a thread of ours would else destroy, which must not drop a tensor's last reference.
  class Shelf {
   public:
    // Of whom nobody asks any more: then a callback outlived its group, and perhaps Python.
    ~Shelf();
    void put(Kept kept);
    std::deque<Kept> take();

   private:
    std::mutex mutex_;
    std::deque<Kept> kept_;
  };

  // `results` is what the future holds; None for a queued inner collective, whose own Work tells.
  HostWork(c10d::OpType type, c10::IValue results, Body body, std::shared_ptr<Shelf> shelf);
  ~HostWork() override;

  // Called once, by the worker, which lets go of `work`. Whatever the body throws is the outcome.
  // Where anyone may have added callbacks, tellers run them.
  static void run(c10::intrusive_ptr<HostWork> work, Tellers& tellers);

  // On return nothing but the caller's own references holds tensors.
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void run_body();
  void complete_future();
  static void tell(c10::intrusive_ptr<HostWork> work);
  void let_go();

  Kept kept_;
  std::exception_ptr error_;  // of the body
  const std::shared_ptr<Shelf> shelf_;
  const int level_ = Tellers::level();
  std::mutex future_mutex_;
  bool asked_ = false;  // for the future, before it was complete
  std::mutex body_mutex_;
  // Set once the last thread of ours has dropped its reference.
  const std::shared_ptr<std::atomic_flag> dropped_ = std::make_shared<std::atomic_flag>();
};

}  // namespace pg_sdma
