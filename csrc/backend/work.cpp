#include "backend/work.h"

#include <utility>

namespace pg_sdma {

HostWork::HostWork(c10d::OpType type, std::vector<at::Tensor> outputs)
    : Work(-1, type),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()))) {}

void HostWork::complete(std::exception_ptr error, const c10::intrusive_ptr<c10d::Work>& inner) {
  if (inner && !error) {
    try {
      outputs_ = inner->result();
    } catch (const std::exception&) {
      // Operations without a result (a barrier) say so by throwing.
    }
  }
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
  finish(std::move(error));
}

std::vector<at::Tensor> HostWork::result() {
  TORCH_CHECK(isCompleted(), "Work::result() needs a completed operation: call wait() first");
  return outputs_;
}

c10::intrusive_ptr<c10::ivalue::Future> HostWork::getFuture() { return future_; }

}  // namespace pg_sdma
