// The Work of an asynchronous gather on device tensors.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "backend/gather.h"

namespace pg_sdma {

// A queue's stream as torch knows streams that it did not make: by the driver's handle.
c10::Stream queue_stream(const Queue& queue, c10::Device device);

class StreamWork final : public c10d::Work {
 public:
  // What has to stay alive until the caller's stream is ordered behind the gather, or it has ended.
  struct Kept {
    std::shared_ptr<Queue::Marker> end;
    std::shared_ptr<Gather> gather;
  };

  StreamWork(c10d::OpType type, std::shared_ptr<Kept> kept, c10::Stream stream, Tensors outputs);

  bool isCompleted() override { return kept_->end->passed(); }
  bool isSuccess() const override { return true; }
  // Orders the caller's current stream behind the gather. With a timeout the host waits too, and
  // an unfinished gather throws.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::shared_ptr<Kept> kept_;
  c10::Stream stream_;
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace pg_sdma
