// The chain of device tensors: everything is enqueued on the calling thread, and order is kept on
// the device, by events between the streams that the operations use.
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "backend/order/chain.h"
#include "backend/order/joint_work.h"
#include "backend/order/stream_work.h"

namespace pg_sdma {
namespace {

class StreamChain final : public Chain {
 public:
  explicit StreamChain(c10::DeviceType device) : guard_(device) {}

  WorkPtr enqueue(Body) override {
    TORCH_INTERNAL_ASSERT(false, "collectives on device tensors do not queue");
  }

  void before_inner() override {
    recorded_ = queue_ != nullptr && queue_->caller_records();
    if (direct_is_last_ && !recorded_) queue_->caller_follows();
  }

  // A synchronous inner collective runs on the caller's stream; an asynchronous one on a stream of
  // the inner's that only its Work knows, and who drops that still finds its collectives in order.
  // Until something has gone direct the Work is remembered weakly, which costs nothing: before that
  // lies the vote.
  void after_inner(const WorkPtr& work) override {
    if (recorded_) return;  // into a graph: no predecessor of what comes next
    direct_is_last_ = false;
    inner_stream_ = guard_.getStream(device_.value_or(guard_.getDevice()));
    inner_work_ = c10::weak_intrusive_ptr<c10d::Work>(WorkPtr());
    inner_end_.reset();
    if (!work) return;
    const auto future = queue_ != nullptr ? future_of(*work) : nullptr;
    if (!future || !future->completed() || future->devices().empty()) {
      inner_work_ = c10::weak_intrusive_ptr<c10d::Work>(work);
      return;
    }
    const c10::Stream bridge = bridge_behind(*work, future->devices().front());
    inner_end_.emplace(bridge.device_type());
    inner_end_->record(bridge);
  }

  void before_direct(Queue& queue) override {
    queue_ = &queue;
    const c10::Stream caller = guard_.getStream(*device_);
    if (asynchronous_) {
      queue_->follow_caller();
    } else {
      queue_->use_callers_stream();
    }
    if (inner_stream_ && *inner_stream_ != caller && inner_stream_->device() == *device_) {
      queue_->follow(inner_stream_->native_handle());
    }
    inner_stream_.reset();
    if (inner_end_) {
      const c10::Stream bridge = pooled_stream(guard_, *device_);
      inner_end_->block(bridge);
      queue_->follow(bridge.native_handle());
    } else if (const WorkPtr before = inner_work_.lock()) {
      queue_->follow(bridge_behind(*before, *device_).native_handle());
    }
    inner_end_.reset();
    inner_work_ = c10::weak_intrusive_ptr<c10d::Work>(WorkPtr());
    direct_is_last_ = true;
  }

  WorkPtr run(std::shared_ptr<Collective> collective, Carrier& carrier) override {
    reap();
    device_ = collective->device();
    asynchronous_ = collective->async;
    std::vector<WorkPtr> pending = carrier.carry(*collective);
    if (!collective->async) {
      if (direct_is_last_) queue_->caller_follows();
      if (pending.empty()) return nullptr;
      return c10::make_intrusive<JointWork>(std::move(pending));
    }
    if (queue_ != nullptr) {
      auto kept = std::make_shared<StreamWork::Kept>(queue_->mark(), collective);
      WorkPtr work = c10::make_intrusive<StreamWork>(kept, *collective);
      kept_.push_back(std::move(kept));
      if (pending.empty()) return work;
      pending.push_back(std::move(work));
    }
    return c10::make_intrusive<JointCall>(std::move(pending), *device_, c10::ListType::ofTensors(),
                                          collective->results());
  }

  void stop(bool) override {}

  void let_go() override {
    for (const auto& kept : kept_) {
      auto collective = kept->collective();
      if (collective && !has_ended(*kept)) new auto(std::move(collective));
    }
    kept_.clear();
    queue_ = nullptr;
    direct_is_last_ = false;
  }

 private:
  // A stream that is ordered behind an inner's collective, whose failure its own Work tells.
  // By its future, because Work::wait() would let go of tensors that the caller's stream is not yet
  // ordered behind. And one of torch's: the allocator remembers the streams that futures are
  // waited for on, longer than the queue's lives.
  c10::Stream bridge_behind(c10d::Work& work, c10::Device device) const {
    const c10::Stream bridge = pooled_stream(guard_, device);
    const StreamGuard on_bridge(guard_, bridge);
    if (const auto future = future_of(work)) {
      try {
        future->wait();
      } catch (const std::exception&) {
      }
    }
    return bridge;
  }

  static bool has_ended(const StreamWork::Kept& kept) {
    try {
      return kept.end->passed();
    } catch (const std::exception&) {
      return false;  // the driver was shut down before us, or the device has failed
    }
  }

  // Drops the tensors of asynchronous calls that have ended and that nobody waited for.
  void reap() {
    while (!kept_.empty() && (!kept_.front()->collective() || kept_.front()->end->passed())) {
      kept_.pop_front();
    }
  }

  const c10::impl::VirtualGuardImpl guard_;
  Queue* queue_ = nullptr;             // the transport's, once it has carried something
  std::optional<c10::Device> device_;  // of the last call
  bool asynchronous_ = false;          // the last call
  bool direct_is_last_ = false;
  bool recorded_ = false;  // the last inner collective, into a graph
  std::optional<c10::Stream> inner_stream_;
  // The end of the last inner collective, or what knows it.
  std::optional<c10::Event> inner_end_;
  c10::weak_intrusive_ptr<c10d::Work> inner_work_{WorkPtr()};
  std::deque<std::shared_ptr<StreamWork::Kept>> kept_;
};

}  // namespace

std::unique_ptr<Chain> make_stream_chain(c10::DeviceType device) {
  return std::make_unique<StreamChain>(device);
}

}  // namespace pg_sdma
