// The Work of an asynchronous call on device tensors.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "backend/collective.h"

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
  struct Kept {
    std::shared_ptr<Queue::Marker> end;
    std::shared_ptr<Collective> collective;
  };

  explicit StreamWork(std::shared_ptr<Kept> kept);

  bool isCompleted() override { return kept_->end->passed(); }
  bool isSuccess() const override { return true; }
  // Orders the caller's current stream behind the collective. With a timeout the host waits too,
  // and an unfinished call throws.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::shared_ptr<Kept> kept_;
  const int rank_of_group_;
  const char* const operation_;
  const c10::Device device_;
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace pg_sdma
