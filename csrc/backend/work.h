// The Work of a collective that a host chain's worker thread issues.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <vector>

namespace pg_sdma {

class HostWork final : public c10d::Work {
 public:
  // `outputs` is what result() gives; empty for a deferred inner collective, whose own Work tells.
  HostWork(c10d::OpType type, std::vector<at::Tensor> outputs);

  // Called once, by the worker. `inner` is the Work that stood in for this one, or null.
  void complete(std::exception_ptr error, const c10::intrusive_ptr<c10d::Work>& inner);

  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace pg_sdma
