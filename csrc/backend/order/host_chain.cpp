// The chain of CPU tensors. Synchronous calls run on the calling thread while nothing is pending;
// asynchronous ones, and all that comes behind them, run in turn on a worker thread. It never waits
// for a thread that runs users' code, such as a future's callback, which may wait for it.
#include <ATen/ThreadLocalState.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "backend/order/chain.h"
#include "backend/order/tellers.h"
#include "backend/order/work.h"
#include "transport/errors.h"

namespace pg_sdma {
namespace {

// How long stop() waits for users' callbacks to end.
constexpr std::chrono::seconds kGrace{2};

// Outlives the chain in the callbacks of the inner's operations, which cannot be called back.
struct Bell {
  std::mutex mutex;
  std::condition_variable rung;
  std::string abandoned;  // why nothing is waited for any more
};

// Whether an operation of the inner has ended; guarded by the bell.
using Ended = std::shared_ptr<bool>;

// Rings when an operation's future completes, or goes without.
class Ringer {
 public:
  Ringer(std::shared_ptr<Bell> bell, Ended ended)
      : bell_(std::move(bell)), ended_(std::move(ended)) {}
  ~Ringer() { ring(); }
  Ringer(const Ringer&) = delete;
  Ringer& operator=(const Ringer&) = delete;

  void ring() {
    {
      std::lock_guard<std::mutex> lock(bell_->mutex);
      *ended_ = true;
    }
    bell_->rung.notify_all();
  }

 private:
  const std::shared_ptr<Bell> bell_;
  const Ended ended_;
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
    return post(c10d::OpType::UNKNOWN, c10::IValue(), [this, body = std::move(body)] {
      const WorkPtr work = body();
      if (work) await(work);
      return work;
    });
  }

  void before_inner() override {}

  // Before anyone else has the future, whose callbacks run in turn: a user's may wait for a
  // collective of this chain. No two threads come here at a time: while the worker is busy every
  // collective goes to it.
  void after_inner(const WorkPtr& work) override {
    {
      std::lock_guard<std::mutex> lock(bell_->mutex);
      while (!inners_.empty() && *inners_.front()) inners_.pop_front();
    }
    if (!work) return;
    if (Ended ended = end_of(*work)) inners_.push_back(std::move(ended));
  }

  void before_direct(Queue&) override {}

  WorkPtr run(std::shared_ptr<Collective> collective, Carrier& carrier) override {
    if (!collective->async && !busy()) {
      carry(*collective, carrier);
      return nullptr;
    }
    const WorkPtr work =
        post(collective->type, collective->results()(), [this, collective, &carrier] {
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
    tellers_.stop(kGrace);
    if (process_ends) new auto(shelf_->take());
    reap();
  }

 private:
  using Task = c10::intrusive_ptr<HostWork>;

  void carry(Collective& collective, Carrier& carrier) {
    // Before the call is published: from then on peers may read the input. Whether they failed is
    // told by their own Works.
    for (; !inners_.empty(); inners_.pop_front()) await(inners_.front());
    for (const WorkPtr& work : carrier.carry(collective)) await(work);
    collective.finish();
  }

  // Null where there is no future: see future_of().
  Ended end_of(c10d::Work& work) {
    const auto future = future_of(work);
    if (!future) return nullptr;
    Ended ended = std::make_shared<bool>(false);
    future->addCallback(
        [ringer = std::make_shared<Ringer>(bell_, ended)](c10::ivalue::Future&) { ringer->ring(); },
        /*uses_future=*/false);
    return ended;
  }

  // Not past abandon(): a gloo operation goes on until its timeout. Throws GroupFault.
  void await(const Ended& ended) {
    std::unique_lock<std::mutex> lock(bell_->mutex);
    bell_->rung.wait(lock, [&] { return *ended || !bell_->abandoned.empty(); });
    if (!*ended) throw GroupFault(bell_->abandoned);
  }

  // Of a Work that nobody else has. Throws what it threw, too.
  void await(const WorkPtr& work) {
    if (const Ended ended = end_of(*work)) await(ended);
    work->wait();
  }

  WorkPtr post(c10d::OpType type, c10::IValue results, HostWork::Body body) {
    // As on the caller's own thread, for whichever operations of torch it takes.
    const auto task = c10::make_intrusive<HostWork>(
        type, std::move(results),
        [this, body = std::move(body), state = at::ThreadLocalState()] {
          const at::ThreadLocalStateGuard as_the_caller(state);
          try {
            throw_if_abandoned();
            return body();
          } catch (const GroupFault& error) {
            TORCH_CHECK_WITH(DistBackendError, false, error.what());
          }
        },
        shelf_);
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
    be_own_thread();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      running_ = true;
      lock.unlock();
      HostWork::run(std::move(task), tellers_);
      lock.lock();
      running_ = false;
      idle_.notify_all();
    }
  }

  // Drops what threads of ours may not.
  void reap() { shelf_->take(); }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Task> tasks_;
  bool running_ = false;
  bool stopping_ = false;
  std::thread worker_;
  std::deque<Ended> inners_;  // issued, and perhaps not complete
  const std::shared_ptr<Bell> bell_ = std::make_shared<Bell>();
  const std::shared_ptr<HostWork::Shelf> shelf_ = std::make_shared<HostWork::Shelf>();
  Tellers tellers_;
};

}  // namespace

std::unique_ptr<Chain> make_host_chain() { return std::make_unique<HostChain>(); }

}  // namespace pg_sdma
