#include "backend/coalesced_gather.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "backend/joint_work.h"
#include "backend/stream_work.h"

namespace pg_sdma {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

bool one_by_one(const c10d::Backend& inner, const Tensors& inputs) {
  const bool elsewhere =
      !inputs.empty() && inputs.front().defined() && !inputs.front().device().is_cpu();
  return elsewhere && inner.getBackendName() == "gloo";
}

// The future is what torch's all_gather_coalesced gives its caller. A gloo Work's own is complete
// once the copies to the device are enqueued, on streams that only synchronize() follows.
class Gathers final : public JointWork {
 public:
  Gathers(std::vector<WorkPtr> works, c10::IValue outputs, c10::Device device)
      : JointWork(std::move(works)), outputs_(std::move(outputs)), device_(device) {}

  FuturePtr getFuture() override {
    std::call_once(asked_, [this] { complete_with_all(); });
    return future_;
  }

 private:
  void complete_with_all() {
    future_ = c10::make_intrusive<c10::ivalue::Future>(outputs_.type(),
                                                       std::vector<c10::Device>{device_});
    c10::List<FuturePtr> futures(c10::FutureType::create(c10::ListType::ofTensors()));
    for (const WorkPtr& work : works_) futures.push_back(work->getFuture());
    c10::collectAll(futures)->addCallback([works = works_, outputs = outputs_, device = device_,
                                           future = future_](c10::ivalue::Future& all) {
      try {
        all.value();  // throws what any of them has thrown
        const c10::impl::VirtualGuardImpl guard(device.type());
        const StreamGuard on_pooled(guard, pooled_stream(guard, device));
        for (const WorkPtr& work : works) work->synchronize();
        future->markCompleted(outputs);
      } catch (const std::exception&) {
        future->setErrorIfNeeded(std::current_exception());
      }
    });
  }

  const c10::IValue outputs_;
  const c10::Device device_;
  std::once_flag asked_;
  FuturePtr future_;
};

}  // namespace

WorkPtr gather_into_tensors(c10d::Backend& inner, Tensors& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options) {
  if (!one_by_one(inner, inputs) || outputs.size() != inputs.size()) {
    return inner.allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  std::vector<WorkPtr> works;
  for (size_t t = 0; t < inputs.size(); ++t) {
    works.push_back(inner._allgather_base(outputs[t], inputs[t], options));
  }
  return c10::make_intrusive<Gathers>(std::move(works), outputs, inputs.front().device());
}

WorkPtr gather_into_lists(c10d::Backend& inner, TensorLists& outputs, Tensors& inputs,
                          const c10d::AllgatherOptions& options) {
  const bool fits = outputs.size() == static_cast<size_t>(inner.getSize()) &&
                    std::all_of(outputs.begin(), outputs.end(), [&](const Tensors& of_rank) {
                      return of_rank.size() == inputs.size();
                    });
  if (!one_by_one(inner, inputs) || !fits) {
    return inner.allgather_coalesced(outputs, inputs, options);
  }
  std::vector<WorkPtr> works;
  for (size_t t = 0; t < inputs.size(); ++t) {
    TensorLists output(1);
    for (const Tensors& of_rank : outputs) output[0].push_back(of_rank[t]);
    Tensors input{inputs[t]};
    works.push_back(inner.allgather(output, input, options));
  }
  return c10::make_intrusive<Gathers>(std::move(works), outputs, inputs.front().device());
}

}  // namespace pg_sdma
