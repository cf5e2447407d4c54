#include "backend/collectives/arguments.h"

#include <algorithm>

namespace pg_sdma {

at::Tensor in_storage_order(const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.is_contiguous()) return tensor;
  if (!tensor.is_contiguous(tensor.suggest_memory_format())) return tensor;
  return tensor.detach().as_strided({tensor.numel()}, {1});
}

std::string dtypes(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return "no";
  const auto same = [&](const at::Tensor& tensor) {
    return tensor.scalar_type() == tensors[0].scalar_type();
  };
  std::string names = c10::toString(tensors[0].scalar_type());
  if (std::all_of(tensors.begin(), tensors.end(), same)) return names;
  for (size_t t = 1; t < tensors.size(); ++t) {
    names += std::string("+") + c10::toString(tensors[t].scalar_type());
  }
  return names;
}

}  // namespace pg_sdma
