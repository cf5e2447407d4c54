// Tensors of a call in words, for messages.
#pragma once

#include <ATen/ATen.h>

#include <sstream>
#include <string>
#include <vector>

namespace pg_sdma {

template <class... Parts>
std::string say(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

inline std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

inline std::string shape(const at::Tensor& tensor) {
  return say(c10::toString(tensor.scalar_type()), " tensor of shape ", tensor.sizes());
}

inline bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided;
}

// On a device, a tensor of a dense memory format other than the default, such as channels_last, as
// a flat view of its memory: NCCL sends that as it lies, and so do its users expect it. Else
// `tensor`.
at::Tensor in_storage_order(const at::Tensor& tensor);

// One name where all tensors have one dtype, else the names of all.
std::string dtypes(const std::vector<at::Tensor>& tensors);

}  // namespace pg_sdma
