#include "backend/order/stream_work.h"

#include <thread>
#include <utility>

#include "backend/order/joint_work.h"

namespace pg_sdma {

c10::Stream pooled_stream(const c10::impl::VirtualGuardImpl& guard, c10::Device device) {
  return guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
}

StreamWork::StreamWork(std::shared_ptr<Kept> kept, const Collective& call)
    : Work(-1, call.type),
      kept_(std::move(kept)),
      rank_of_group_(call.rank()),
      operation_(call.name()),
      device_(call.device()),
      results_(call.results()) {}

bool StreamWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (timeout == kNoTimeout) return true;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!kept_->end->passed()) {
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "rank ", rank_of_group_, ": ",
                operation_, " was not done after ", timeout.count(),
                " ms; look for the rank that has not made it (pg_sdma.flight_record())");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

void StreamWork::synchronize() {
  kept_->end->caller_follows();
  if (const auto collective = kept_->take()) {
    collective->followed_by(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> StreamWork::getFuture() {
  std::call_once(asked_, [this] {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_});
    // A future is complete once its work is enqueued: it records an event on the current stream
    // and orders whoever waits for it behind that.
    const c10::impl::VirtualGuardImpl guard(device_.type());
    const StreamGuard on_pooled(guard, pooled_stream(guard, device_));
    kept_->end->caller_follows();
    future->markCompleted(results_());
    future_ = std::move(future);
  });
  return future_;
}

std::vector<at::Tensor> StreamWork::result() { return tensors_of(*getFuture()); }

}  // namespace pg_sdma
