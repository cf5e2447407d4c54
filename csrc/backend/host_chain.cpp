// The chain of CPU tensors. Synchronous calls run on the calling thread while nothing is pending;
// asynchronous ones, and all that comes behind them, run in turn on a worker thread.
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "backend/chain.h"
#include "backend/fork_guard.h"
#include "backend/work.h"

namespace pg_sdma {
namespace {

// How long stop() lets pending operations complete before it gives them up.
constexpr std::chrono::seconds kGrace{2};

class HostChain final : public Chain {
 public:
  ~HostChain() override {
    stop([] {});
    // In a forked child the thread does not exist, and joining it would wait for ever.
    if (fork_guard_.forked() && worker_.joinable()) worker_.detach();
  }

  bool defers() override {
    reap();
    std::lock_guard<std::mutex> lock(mutex_);
    return !tasks_.empty() || running_;
  }

  WorkPtr defer(Body body) override {
    return post(c10::make_intrusive<HostWork>(c10d::OpType::UNKNOWN, Tensors{}), std::move(body));
  }

  void before_inner() override {}

  // Weak: gloo holds a Work until it has run, so one that is gone is complete, and holding it
  // would keep its tensors alive.
  void after_inner(const WorkPtr& work) override {
    last_inner_ = c10::weak_intrusive_ptr<c10d::Work>(work);
  }

  // On the worker too: while it is busy every inner collective is deferred to it, so last_inner_
  // does not change under its hands.
  void before_direct(Transport&) override {
    const WorkPtr before = last_inner_.lock();
    if (!before || before->isCompleted()) return;
    try {
      before->wait();
    } catch (const std::exception&) {
      // Its failure is told by its own Work; here only its end matters.
    }
  }

  WorkPtr gather(std::shared_ptr<Gather> gather, Carrier& carrier) override {
    if (!gather->async && !defers()) {
      carrier.carry(*gather);
      gather->finish();
      return nullptr;
    }
    auto work = c10::make_intrusive<HostWork>(gather->type, gather->outputs());
    const bool async = gather->async;
    post(work, [gather = std::move(gather), &carrier]() -> WorkPtr {
      carrier.carry(*gather);
      gather->finish();
      return nullptr;
    });
    if (async) return work;
    work->wait();
    return nullptr;
  }

  void stop(const std::function<void()>& give_up) override {
    if (fork_guard_.forked()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!worker_.joinable()) return;
    const bool idle =
        idle_.wait_for(lock, kGrace, [this] { return tasks_.empty() && !running_; });
    stopping_ = true;
    lock.unlock();
    wake_.notify_all();
    if (!idle) give_up();
    worker_.join();
    reap();
  }

 private:
  struct Task {
    c10::intrusive_ptr<HostWork> work;
    Body body;
  };

  WorkPtr post(c10::intrusive_ptr<HostWork> work, Body body) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!stopping_, "the group has been shut down");
      tasks_.push_back({work, std::move(body)});
      if (!worker_.joinable()) worker_ = std::thread([this] { serve(); });
    }
    wake_.notify_one();
    return work;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      const bool drop = stopping_;
      running_ = true;
      lock.unlock();
      run(task, drop);
      lock.lock();
      running_ = false;
      // The last reference to a tensor may not be dropped here: Python may have finalised.
      finished_.push_back(std::move(task));
      idle_.notify_all();
    }
  }

  static void run(Task& task, bool drop) {
    try {
      TORCH_CHECK(!drop, "the group was shut down before the operation ran");
      const WorkPtr inner = task.body();
      if (inner) inner->wait();
      task.work->complete(nullptr, inner);
    } catch (const std::exception&) {
      task.work->complete(std::current_exception(), nullptr);
    }
  }

  // Drops what the worker has finished, on a thread that may.
  void reap() {
    std::deque<Task> finished;
    std::lock_guard<std::mutex> lock(mutex_);
    finished.swap(finished_);
  }

  ForkGuard fork_guard_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Task> tasks_;
  std::deque<Task> finished_;
  bool running_ = false;
  bool stopping_ = false;
  std::thread worker_;
  c10::weak_intrusive_ptr<c10d::Work> last_inner_{WorkPtr()};
};

}  // namespace

std::unique_ptr<Chain> make_host_chain() { return std::make_unique<HostChain>(); }

}  // namespace pg_sdma
