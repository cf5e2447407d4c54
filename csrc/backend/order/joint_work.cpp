#include "backend/order/joint_work.h"

#include <atomic>

#include "backend/order/stream_work.h"

namespace pg_sdma {

// What the parts' futures share until the last of them is complete.
struct JointCall::Parts {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<FuturePtr> futures;
  Results results;
  c10::Device device;
  FuturePtr future;
  std::atomic<size_t> left;

  void one_has_ended() {
    if (--left != 0) return;
    try {
      const c10::impl::VirtualGuardImpl guard(device.type());
      const StreamGuard on_pooled(guard, pooled_stream(guard, device));
      for (size_t i = 0; i < works.size(); ++i) {
        futures[i]->waitAndThrow();
        // gloo's is complete once the copies to the device are enqueued, on streams that only the
        // Work knows. Others' futures order streams, and their Works would let go of tensors.
        if (futures[i]->devices().empty()) works[i]->synchronize();
      }
      future->markCompleted(results());
    } catch (const std::exception&) {
      future->setErrorIfNeeded(std::current_exception());
    }
  }
};

JointCall::JointCall(std::vector<c10::intrusive_ptr<c10d::Work>> works, c10::Device device,
                     c10::TypePtr type, Results results)
    : JointWork(std::move(works)),
      device_(device),
      type_(std::move(type)),
      results_(std::move(results)) {}

JointCall::FuturePtr JointCall::getFuture() {
  std::call_once(asked_, [this] {
    std::vector<FuturePtr> futures;
    for (const auto& work : works_) futures.push_back(work->getFuture());
    future_ = c10::make_intrusive<c10::ivalue::Future>(type_, std::vector<c10::Device>{device_});
    auto parts = std::shared_ptr<Parts>(
        new Parts{works_, futures, results_, device_, future_, futures.size() + 1});
    for (const FuturePtr& future : futures) {
      future->addCallback([parts](c10::ivalue::Future&) { parts->one_has_ended(); },
                          /*uses_future=*/false);
    }
    parts->one_has_ended();  // and where there are none
  });
  return future_;
}

std::vector<at::Tensor> JointCall::result() { return tensors_of(*getFuture()); }

std::vector<at::Tensor> tensors_of(c10::ivalue::Future& future) {
  future.waitAndThrow();
  return tensors_of(future.value());
}

std::vector<at::Tensor> tensors_of(const c10::IValue& results) {
  TORCH_CHECK(results.isTensorList(),
              "Work::result() of a list of tensors a rank: use get_future().value()");
  return results.toTensorVector();
}

}  // namespace pg_sdma
