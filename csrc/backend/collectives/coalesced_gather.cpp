#include "backend/collectives/coalesced_gather.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <utility>

#include "backend/order/joint_work.h"

namespace pg_sdma {
namespace {

bool one_by_one(const c10d::Backend& inner, const Tensors& inputs) {
  const bool elsewhere =
      !inputs.empty() && inputs.front().defined() && !inputs.front().device().is_cpu();
  return elsewhere && inner.getBackendName() == "gloo";
}

// With what torch's all_gather_coalesced gives its caller as results.
template <class Outputs>
WorkPtr joint_call(std::vector<WorkPtr> works, const Outputs& outputs, const Tensors& inputs) {
  c10::IValue results(outputs);
  const c10::TypePtr type = results.type();
  return c10::make_intrusive<JointCall>(std::move(works), inputs.front().device(), type,
                                        [results = std::move(results)] { return results; });
}

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
  return joint_call(std::move(works), outputs, inputs);
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
  return joint_call(std::move(works), outputs, inputs);
}

}  // namespace pg_sdma
