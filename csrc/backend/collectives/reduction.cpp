#include "backend/collectives/reduction.h"

#include <ATen/ATen.h>

#include <array>
#include <cstdio>

#include "torch_version.h"

namespace pg_sdma {
namespace {

using c10d::ReduceOp;
#if PG_SDMA_TORCH_AT_LEAST(2, 13)
using Premultiplier = c10d::PreMulSumSupplement;
#else
using Premultiplier = c10d::NCCLPreMulSumSupplement;
#endif

constexpr std::array<const char*, 10> kNames{"SUM",  "AVG", "PRODUCT", "MIN",        "MAX",
                                             "BAND", "BOR", "BXOR",    "PREMUL_SUM", "UNUSED"};

bool on_device(const ReduceOp& op) {
  const at::Tensor& factor = static_cast<const Premultiplier&>(*op.supplement_).tensor_factor;
  return factor.defined() && !factor.is_cpu();
}

}  // namespace

std::string Reduction::words() const {
  if (kind == Kind::kSum) return "SUM";
  if (kind == Kind::kAverage) return "AVG";
  char text[40];
  // 17 digits tell any two doubles apart.
  std::snprintf(text, sizeof text, "PREMUL_SUM by %.17g", factor);
  return text;
}

std::string refusal(const ReduceOp& op, c10::Device device) {
  switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::AVG:
      return "";
    case ReduceOp::PREMUL_SUM:
      if (!op.supplement_) return "PREMUL_SUM without a factor";
      // Reading it would make the host wait for the device.
      if (!device.is_cpu() && on_device(op)) return "PREMUL_SUM by a tensor on the device";
      return "";
    default:
      return op.op_ < kNames.size() ? std::string("reduce operation ") + kNames[op.op_]
                                    : "unknown reduce operation";
  }
}

Reduction::Kind kind_of(const ReduceOp& op) {
  if (op.op_ == ReduceOp::SUM) return Reduction::Kind::kSum;
  return op.op_ == ReduceOp::AVG ? Reduction::Kind::kAverage : Reduction::Kind::kPremultiplied;
}

Reduction read_reduction(const ReduceOp& op) {
  if (kind_of(op) != Reduction::Kind::kPremultiplied) return {kind_of(op), 1};
  const auto& factor = static_cast<const Premultiplier&>(*op.supplement_);
  return {Reduction::Kind::kPremultiplied, factor.tensor_factor.defined()
                                               ? factor.tensor_factor.item<double>()
                                               : factor.double_factor};
}

}  // namespace pg_sdma
