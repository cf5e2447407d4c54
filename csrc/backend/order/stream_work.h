// The Work of an asynchronous call on device tensors.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/collectives/collective.h"

namespace pg_sdma {

// One of torch's own streams, for work that torch must be able to remember.
c10::Stream pooled_stream(const c10::impl::VirtualGuardImpl& guard, c10::Device device);

// Makes a stream the calling thread's current one, for a while.
class StreamGuard {
 public:
  StreamGuard(const c10::impl::VirtualGuardImpl& guard, c10::Stream stream)
      : guard_(guard), before_(guard.exchangeStream(stream)) {}
  ~StreamGuard() { guard_.exchangeStream(before_); }

 private:
  const c10::impl::VirtualGuardImpl& guard_;
  const c10::Stream before_;
};

class StreamWork final : public c10d::Work {
 public:
  // What has to stay alive until the caller's stream is ordered behind the call, or it has ended.
  // Of the Work, on whichever thread waits for it, and of the chain.
  class Kept {
   public:
    Kept(std::shared_ptr<Queue::Marker> end, std::shared_ptr<Collective> collective)
        : end(std::move(end)), collective_(std::move(collective)) {}

    const std::shared_ptr<Queue::Marker> end;

    std::shared_ptr<Collective> collective() const {
      std::lock_guard<std::mutex> lock(mutex_);
      return collective_;
    }
    std::shared_ptr<Collective> take() {
      std::lock_guard<std::mutex> lock(mutex_);
      return std::exchange(collective_, nullptr);
    }

   private:
    mutable std::mutex mutex_;
    std::shared_ptr<Collective> collective_;
  };

  // `call`: what `kept` keeps.
  StreamWork(std::shared_ptr<Kept> kept, const Collective& call);

  bool isCompleted() override { return kept_->end->passed(); }
  bool isSuccess() const override { return true; }
  // Orders the caller's current stream behind the collective. With a timeout the host waits too,
  // and an unfinished call throws.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  // Orders the caller's current stream behind the collective.
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::shared_ptr<Kept> kept_;
  const int rank_of_group_;
  const char* const operation_;
  const c10::Device device_;
  const Collective::Results results_;
  std::once_flag asked_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace pg_sdma
