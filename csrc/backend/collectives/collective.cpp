#include "backend/collectives/collective.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include "backend/collectives/arguments.h"

namespace pg_sdma {

void Collective::lay_out() {
  if (!call.invalid.empty()) return;
  try {
    const at::NoGradGuard no_grad;
    add_tensors();
  } catch (const std::exception& error) {
    forget_tensors();
    call.invalid = say("rank ", rank_, ": ", call.operation, ": ", first_line(error.what()));
  }
}

void Collective::finish() {
  const at::NoGradGuard no_grad;
  for (const auto& [output, stand_in] : stand_ins_) output.copy_(stand_in);
}

std::string Collective::check_tensors(const std::string& who) const {
  const at::Device device = this->device();
  for (const Tensors* tensors : {&inputs_, &outputs_}) {
    for (const at::Tensor& tensor : *tensors) {
      const char* which = tensors == &inputs_ ? "an input" : "an output";
      if (!is_plain(tensor)) return say(who, "expected dense tensors, ", which, " is not");
      if (tensor.device() != device) {
        return say(who, "expected all tensors on ", device, ", ", which, " is on ",
                   tensor.device());
      }
      // gloo copies for its callers, NCCL asks for contiguous tensors: each inner's users get what
      // they are used to.
      if (!device.is_cpu() && !in_storage_order(tensor).is_contiguous()) {
        return say(who, "expected contiguous tensors, ", which, " (", shape(tensor),
                   ") is not; pass tensor.contiguous()");
      }
    }
  }
  return "";
}

void* Collective::landing(const at::Tensor& output) {
  if (in_storage_order(output).is_contiguous()) return output.mutable_data_ptr();
  at::assert_no_internal_overlap(output);  // else finish() would raise, on this rank alone
  stand_ins_.emplace_back(output, at::empty(output.sizes(), output.options()));
  return stand_ins_.back().second.mutable_data_ptr();
}

}  // namespace pg_sdma
