// The chain of CPU tensors. Synchronous calls run on the calling thread while nothing is pending;
// asynchronous ones, and all that comes behind them, run in turn on a worker thread.
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "backend/chain.h"
#include "backend/work.h"

namespace pg_sdma {
namespace {

// Outlives the chain in the callbacks of the inner's operations, which cannot be called back.
struct Bell {
  std::mutex mutex;
  std::condition_variable rung;
  std::string abandoned;  // why nothing is waited for any more
};

class HostChain final : public Chain {
 public:
  bool has_worker() const override { return true; }

  bool busy() override {
    reap();
    std::lock_guard<std::mutex> lock(mutex_);
    return !tasks_.empty() || running_;
  }

  WorkPtr enqueue(Body body) override {
    return post(c10d::OpType::UNKNOWN, {}, [this, body = std::move(body)] {
      const WorkPtr work = body();
      if (work) await(work);
      return work;
    });
  }

  void before_inner() override {}

  // Weak: gloo holds a Work until it has run, so one that is gone is complete, and holding it
  // would keep its tensors alive. No two threads come here at a time: while the worker is busy
  // every collective goes to it.
  void after_inner(const WorkPtr& work) override {
    while (!inners_.empty() && has_ended(inners_.front())) inners_.pop_front();
    if (work) inners_.emplace_back(work);
  }

  void before_direct(Transport&) override {}

  WorkPtr run(std::shared_ptr<Collective> collective, Carrier& carrier) override {
    if (!collective->async && !busy()) {
      carry(*collective, carrier);
      return nullptr;
    }
    const WorkPtr work =
        post(collective->type, collective->outputs(), [this, collective, &carrier] {
          carry(*collective, carrier);
          return WorkPtr();
        });
    if (collective->async) return work;
    work->wait();
    return nullptr;
  }

  void abandon(const std::string& why) override {
    {
      std::lock_guard<std::mutex> lock(bell_->mutex);
      if (bell_->abandoned.empty()) bell_->abandoned = why;
    }
    bell_->rung.notify_all();
  }

  bool await_idle(std::chrono::milliseconds limit) override {
    std::unique_lock<std::mutex> lock(mutex_);
    return idle_.wait_for(lock, limit, [this] { return tasks_.empty() && !running_; });
  }

  void stop(bool process_ends) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!worker_.joinable()) return;
      stopping_ = true;
    }
    wake_.notify_all();
    worker_.join();
    if (process_ends) new auto(std::move(kept_));
    reap();
  }

 private:
  using Task = c10::intrusive_ptr<HostWork>;
  using WeakWork = c10::weak_intrusive_ptr<c10d::Work>;

  static bool has_ended(const WeakWork& weak) {
    const WorkPtr work = weak.lock();
    return !work || work->isCompleted();
  }

  void carry(Collective& collective, Carrier& carrier) {
    // Before the call is published: from then on peers may read the input.
    for (; !inners_.empty(); inners_.pop_front()) {
      const WorkPtr before = inners_.front().lock();
      if (!before || !future_of(*before)) continue;
      try {
        await(before);
      } catch (const GroupFault&) {
        throw;
      } catch (const std::exception&) {
        // Its failure is told by its own Work; here only its end matters.
      }
    }
    for (const WorkPtr& work : carrier.carry(collective)) await(work);
    collective.finish();
  }

  // Waits for an operation of the inner, but not past abandon(): a gloo operation goes on until its
  // timeout. Throws what it threw, or GroupFault.
  void await(const WorkPtr& work) {
    const auto future = future_of(*work);
    if (!future) {
      work->wait();
      return;
    }
    auto ended = std::make_shared<bool>(false);
    future->addCallback([bell = bell_, ended](c10::ivalue::Future&) {
      {
        std::lock_guard<std::mutex> lock(bell->mutex);
        *ended = true;
      }
      bell->rung.notify_all();
    });
    std::unique_lock<std::mutex> lock(bell_->mutex);
    bell_->rung.wait(lock, [&] { return *ended || !bell_->abandoned.empty(); });
    if (!*ended) throw GroupFault(bell_->abandoned);
    lock.unlock();
    work->wait();
  }

  WorkPtr post(c10d::OpType type, Tensors outputs, HostWork::Body body) {
    const auto task =
        c10::make_intrusive<HostWork>(type, std::move(outputs), [this, body = std::move(body)] {
          try {
            throw_if_abandoned();
            return body();
          } catch (const GroupFault& error) {
            TORCH_CHECK_WITH(DistBackendError, false, error.what());
          }
        });
    {
      std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK_WITH(DistBackendError, !stopping_,
                       "the group has been destroyed; make a new one");
      tasks_.push_back(task);
      if (!worker_.joinable()) worker_ = std::thread([this] { serve(); });
    }
    wake_.notify_one();
    return task;
  }

  void throw_if_abandoned() {
    std::lock_guard<std::mutex> lock(bell_->mutex);
    if (!bell_->abandoned.empty()) throw GroupFault(bell_->abandoned);
  }

  void serve() {
    HostWork::keep_with([this](HostWork::Kept kept) {
      std::lock_guard<std::mutex> lock(mutex_);
      kept_.push_back(std::move(kept));
    });
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      running_ = true;
      lock.unlock();
      HostWork::run(std::move(task));
      lock.lock();
      running_ = false;
      idle_.notify_all();
    }
  }

  // Drops what the worker may not.
  void reap() {
    std::deque<HostWork::Kept> kept;
    std::lock_guard<std::mutex> lock(mutex_);
    kept.swap(kept_);
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Task> tasks_;
  std::deque<HostWork::Kept> kept_;
  bool running_ = false;
  bool stopping_ = false;
  std::thread worker_;
  std::deque<WeakWork> inners_;  // issued, and perhaps not complete
  const std::shared_ptr<Bell> bell_ = std::make_shared<Bell>();
};

}  // namespace

std::unique_ptr<Chain> make_host_chain() { return std::make_unique<HostChain>(); }

}  // namespace pg_sdma
