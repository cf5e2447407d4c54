// How much a collective moves, read off its arguments, whichever operation it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "backend/log/flight_recorder.h"

namespace pg_sdma {

// Fills the sizes of `made` from the arguments of a c10d::Backend virtual: outputs come first
// there, then inputs; operations that work in place have one of the two.
class CallSizes {
 public:
  template <class... Arguments>
  static void fill(FlightRecorder::Made& made, const Arguments&... arguments) {
    CallSizes sizes;
    (sizes.take(arguments), ...);
    made.output_elements = sizes.elements_[0];
    made.input_elements = sizes.elements_[sizes.groups_ > 1 ? 1 : 0];
    made.tensors = sizes.tensors_;
    made.dtype = sizes.dtype_;
  }

 private:
  void take(const at::Tensor& tensor) {
    if (groups_ < 2) add(tensor);
    ++groups_;
  }
  void take(const std::vector<at::Tensor>& tensors) {
    if (groups_ < 2) {
      for (const at::Tensor& tensor : tensors) add(tensor);
    }
    ++groups_;
  }
  void take(const std::vector<std::vector<at::Tensor>>& lists) {
    if (groups_ < 2) {
      for (const auto& tensors : lists) {
        for (const at::Tensor& tensor : tensors) add(tensor);
      }
    }
    ++groups_;
  }
  template <class Other>
  void take(const Other&) {}

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    elements_[groups_] += static_cast<uint64_t>(tensor.numel());
    if (dtype_ == c10::ScalarType::Undefined) dtype_ = tensor.scalar_type();
    ++tensors_;
  }

  uint64_t elements_[2] = {0, 0};
  int groups_ = 0;
  uint32_t tensors_ = 0;
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
};

}  // namespace pg_sdma
