#include "backend/work.h"

namespace pg_sdma {
namespace {

thread_local HostWork::Keeper keeper_of_worker;

}  // namespace

HostWork::HostWork(c10d::OpType type, std::vector<at::Tensor> outputs, Body body)
    : Work(-1, type),
      kept_{
          std::move(body), std::move(outputs),
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))} {
}

HostWork::~HostWork() {
  if (keeper_of_worker) keeper_of_worker(std::move(kept_));
}

void HostWork::keep_with(Keeper keeper) { keeper_of_worker = std::move(keeper); }

void HostWork::run(c10::intrusive_ptr<HostWork> work) {
  const auto dropped = work->dropped_;
  work->run_body();
  work.reset();
  dropped->test_and_set();
  dropped->notify_all();
}

void HostWork::run_body() {
  std::exception_ptr error;
  try {
    if (const auto inner = kept_.body()) {
      try {
        kept_.outputs = inner->result();
      } catch (const std::exception&) {
        // Operations without a result (a barrier) say so by throwing.
      }
    }
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  if (error) {
    kept_.future->setError(error);
  } else {
    kept_.future->markCompleted(c10::IValue(kept_.outputs));
  }
  finish(std::move(error));
}

bool HostWork::wait(std::chrono::milliseconds timeout) {
  struct AtEnd {
    HostWork& work;
    ~AtEnd() { work.let_go(); }
  } at_end{*this};
  return Work::wait(timeout);
}

void HostWork::let_go() {
  // Not while it is in use, nor on the worker itself, in a callback of the future's.
  if (!isCompleted() || keeper_of_worker) return;
  dropped_->wait(false);
  Body body;
  std::lock_guard<std::mutex> lock(body_mutex_);
  body.swap(kept_.body);
}

std::vector<at::Tensor> HostWork::result() {
  TORCH_CHECK(isCompleted(), c10d::opTypeToString(retrieveOpType()),
              ": Work::result() needs a completed operation: call wait() first");
  return kept_.outputs;
}

c10::intrusive_ptr<c10::ivalue::Future> HostWork::getFuture() { return kept_.future; }

}  // namespace pg_sdma
