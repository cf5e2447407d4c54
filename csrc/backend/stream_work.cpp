#include "backend/stream_work.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>
#include <utility>

namespace pg_sdma {

c10::Stream queue_stream(const Queue& queue, c10::Device device) {
  return c10::Stream(c10::Stream::UNSAFE, device,
                     reinterpret_cast<c10::StreamId>(queue.native()));
}

StreamWork::StreamWork(c10d::OpType type, std::shared_ptr<Kept> kept, c10::Stream stream,
                       Tensors outputs)
    : Work(-1, type), kept_(std::move(kept)), stream_(stream), outputs_(std::move(outputs)) {}

bool StreamWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (timeout == kNoTimeout) return true;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!kept_->end->passed()) {
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "the all-gather was not done after ",
                timeout.count(), " ms; look for the rank that has not made it");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

void StreamWork::synchronize() {
  kept_->end->caller_follows();
  kept_->gather.reset();
}

c10::intrusive_ptr<c10::ivalue::Future> StreamWork::getFuture() {
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream_.device()});
    // A future is complete once its work is enqueued: it records an event on the current stream
    // and orders whoever waits for it behind that.
    const c10::impl::VirtualGuardImpl guard(stream_.device_type());
    const c10::Stream before = guard.exchangeStream(stream_);
    future_->markCompleted(c10::IValue(outputs_));
    guard.exchangeStream(before);
  }
  return future_;
}

}  // namespace pg_sdma
