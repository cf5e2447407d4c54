#include "backend/order/work.h"

#include "backend/order/chain.h"
#include "backend/order/joint_work.h"

namespace pg_sdma {

HostWork::Shelf::~Shelf() {
  if (!kept_.empty()) new auto(std::move(kept_));
}

void HostWork::Shelf::put(Kept kept) {
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_back(std::move(kept));
}

std::deque<HostWork::Kept> HostWork::Shelf::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(kept_, {});
}

HostWork::HostWork(c10d::OpType type, c10::IValue results, Body body, std::shared_ptr<Shelf> shelf)
    : Work(-1, type),
      kept_{std::move(body), std::move(results), nullptr},
      shelf_(std::move(shelf)) {
  const auto list = c10::ListType::ofTensors();
  kept_.future = c10::make_intrusive<c10::ivalue::Future>(
      kept_.results.isNone() ? c10::TypePtr(list) : kept_.results.type());
}

HostWork::~HostWork() {
  if (on_own_thread()) shelf_->put(std::move(kept_));
}

void HostWork::run(c10::intrusive_ptr<HostWork> work, Tellers& tellers) {
  work->run_body();
  {
    std::lock_guard<std::mutex> lock(work->future_mutex_);
    if (!work->asked_) work->complete_future();
  }
  if (work->kept_.future->completed()) {
    tell(std::move(work));
    return;
  }
  const int level = work->level_;
  tellers.run(level, [work = std::move(work)]() mutable {
    work->complete_future();
    tell(std::move(work));
  });
}

void HostWork::run_body() {
  try {
    if (const auto inner = kept_.body()) {
      if (const auto future = future_of(*inner)) kept_.results = future->value();
    }
  } catch (const std::exception&) {
    error_ = std::current_exception();
  }
  if (kept_.results.isNone()) kept_.results = std::vector<at::Tensor>();
}

void HostWork::complete_future() {
  if (error_) {
    kept_.future->setError(error_);
  } else {
    kept_.future->markCompleted(kept_.results);
  }
}

// After the callbacks, as gloo: who has waited finds what they have done.
void HostWork::tell(c10::intrusive_ptr<HostWork> work) {
  const auto dropped = work->dropped_;
  work->finish(work->error_);
  work.reset();
  dropped->test_and_set();
  dropped->notify_all();
}

bool HostWork::wait(std::chrono::milliseconds timeout) {
  struct AtEnd {
    HostWork& work;
    ~AtEnd() { work.let_go(); }
  } at_end{*this};
  if (Tellers::level() > level_) {
    // In a callback of this one, or of one beside it: not for the end of callbacks.
    if (kept_.future->completed()) {
      kept_.future->waitAndThrow();
      return true;
    }
    Tellers::step_aside();
  }
  return Work::wait(timeout);
}

void HostWork::let_go() {
  // Not while it is in use, nor on a thread of ours.
  if (!isCompleted() || on_own_thread()) return;
  dropped_->wait(false);
  Body body;
  std::lock_guard<std::mutex> lock(body_mutex_);
  body.swap(kept_.body);
}

std::vector<at::Tensor> HostWork::result() {
  TORCH_CHECK(isCompleted(), c10d::opTypeToString(retrieveOpType()),
              ": Work::result() needs a completed operation: call wait() first");
  return tensors_of(kept_.results);
}

c10::intrusive_ptr<c10::ivalue::Future> HostWork::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  asked_ = true;
  return kept_.future;
}

}  // namespace pg_sdma
