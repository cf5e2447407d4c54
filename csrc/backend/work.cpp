#include "backend/work.h"

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

HostWork::HostWork(c10d::OpType type, std::vector<at::Tensor> outputs, Body body,
                   std::shared_ptr<Shelf> shelf)
    : Work(-1, type),
      kept_{
          std::move(body), std::move(outputs),
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))},
      shelf_(std::move(shelf)) {}

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
      try {
        kept_.outputs = inner->result();
      } catch (const std::exception&) {
        // Operations without a result (a barrier) say so by throwing.
      }
    }
  } catch (const std::exception&) {
    error_ = std::current_exception();
  }
}

void HostWork::complete_future() {
  if (error_) {
    kept_.future->setError(error_);
  } else {
    kept_.future->markCompleted(c10::IValue(kept_.outputs));
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
  return kept_.outputs;
}

c10::intrusive_ptr<c10::ivalue::Future> HostWork::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  asked_ = true;
  return kept_.future;
}

}  // namespace pg_sdma
