// The Work of a collective that a host chain's worker thread carries out.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace pg_sdma {

class HostWork final : public c10d::Work {
 public:
  // Carries the collective out. Returns the Work of the inner that did it, complete, or null.
  using Body = std::function<c10::intrusive_ptr<c10d::Work>()>;

  // What keeps tensors alive.
  struct Kept {
    Body body;
    std::vector<at::Tensor> outputs;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };
  // Takes what a worker would else destroy: the last reference to a tensor must not be dropped by a
  // thread of ours, because Python may have finalised.
  using Keeper = std::function<void(Kept)>;

  // `outputs` is what result() gives; empty for a queued inner collective, whose own Work tells.
  HostWork(c10d::OpType type, std::vector<at::Tensor> outputs, Body body);
  ~HostWork() override;

  // Makes the calling thread a worker.
  static void keep_with(Keeper keeper);
  // Called once, by the worker, which lets go of `work`. Whatever the body throws is the outcome.
  static void run(c10::intrusive_ptr<HostWork> work);

  // On return nothing but the caller's own references holds tensors.
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void run_body();
  void let_go();

  Kept kept_;
  std::mutex body_mutex_;
  // Set once the worker has dropped its reference.
  const std::shared_ptr<std::atomic_flag> dropped_ = std::make_shared<std::atomic_flag>();
};

}  // namespace pg_sdma
