#include "backend/lane.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "backend/self_test.h"
#include "engine/cuda.h"
#include "engine/host.h"

namespace pg_sdma {
namespace {

std::function<void(const std::string&)>& log_function() {
  // Never destroyed: a static destructor would drop a Python reference after Python has ended.
  static auto* function = new std::function<void(const std::string&)>();
  return *function;
}

// The vote's keys on the group's store.
class StoreBoard final : public Board {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void post(const std::string& key, const std::string& value) override {
    store_->set("sdma/" + key, value);
  }

  std::vector<std::string> collect(const std::vector<std::string>& keys,
                                   std::chrono::milliseconds timeout) override {
    std::vector<std::string> full;
    for (const std::string& key : keys) full.push_back("sdma/" + key);
    try {
      store_->wait(full, timeout);
    } catch (const std::exception& error) {
      throw std::runtime_error(missing(full) + " (" + first_line(error.what()) + ")");
    }
    std::vector<std::string> values;
    for (const std::string& key : full) values.push_back(store_->get_to_str(key));
    return values;
  }

 private:
  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  std::string missing(const std::vector<std::string>& keys) {
    std::string names;
    for (const std::string& key : keys) {
      if (!store_->check({key})) names += (names.empty() ? "nothing came under " : ", ") + key;
    }
    return names.empty() ? "the store did not answer" : names;
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

Rendezvous::Options rendezvous_options(const Group& group, c10::DeviceType device) {
  Rendezvous::Options options;
  options.group = group.name;
  options.lane = c10::DeviceTypeName(device, /*lower_case=*/true);
  options.rank = group.rank;
  options.world = group.size;
  options.enabled = group.settings.enabled;
  options.settings = group.settings.agreed;
  options.ring = group.settings.ring;
  options.let_peers_read = group.settings.let_peers_read;
  if (group.settings.patience_ms) {
    options.patience =
        std::chrono::microseconds(static_cast<int64_t>(1000 * *group.settings.patience_ms));
  }
  options.allow_same_device = group.settings.allow_same_device;
  options.allow_pcie = group.settings.allow_pcie;
  return options;
}

// A torch that was not built for a device has no streams of it, and no tensors on it either.
std::unique_ptr<Chain> make_chain(c10::DeviceType device) {
  const bool has_streams = device != c10::kCPU && c10::impl::hasDeviceGuardImpl(device);
  return has_streams ? make_stream_chain(device) : make_host_chain();
}

}  // namespace

void set_log(std::function<void(const std::string&)> log) { log_function() = std::move(log); }

Lane::Lane(std::shared_ptr<const Group> group, c10::DeviceType device,
           c10::intrusive_ptr<c10d::Backend> inner)
    : group_(std::move(group)),
      device_(device),
      inner_(std::move(inner)),
      timeout_(group_->timeout),
      rendezvous_(rendezvous_options(*group_, device),
                  std::make_shared<StoreBoard>(group_->store)),
      chain_(make_chain(device)) {
  rendezvous_.join();
}

Lane::~Lane() { shutdown(); }

WorkPtr Lane::gather(std::shared_ptr<Gather> gather) {
  std::lock_guard<std::mutex> lock(mutex_);
  check_fork();
  if (!engine_ && !voted_) make_engine(gather->device());
  gather->facts.capturing = engine_ && engine_->capturing();
  if (!voted_ && !gather->facts.capturing && !gather->facts.coalescing) vote();
  const std::string refusal = static_refusal(gather->facts, policy_);
  if (!refusal.empty()) return take_inner(*gather, refusal);
  if (gather->call.timeout.count() <= 0) gather->call.timeout = timeout_.load();
  try {
    return chain_->gather(std::move(gather), *this);
  } catch (const BadCall& error) {
    TORCH_CHECK(false, error.what());
  } catch (const GroupFault& error) {
    TORCH_CHECK_WITH(DistBackendError, false, error.what());
  }
}

std::vector<WorkPtr> Lane::carry(Gather& gather) {
  std::vector<WorkPtr> pending;
  const size_t tensors = gather.call.pieces.size();
  size_t first = 0;
  do {
    const size_t last = std::min<size_t>(tensors, first + kMaxTensors);
    const Call part = gather.part(first, last);
    const Decision decision = transport_->agree(part);
    stats_.count(part.operation, decision.reason, part.output_bytes());
    if (decision.direct) {
      RECORD_FUNCTION("sdma::" + part.operation + " direct", std::vector<c10::IValue>());
      chain_->before_direct(*transport_);
      transport_->carry(part);
    } else {
      refuse_silence(gather, decision.reason);
      chain_->before_inner();
      WorkPtr work = gather.part_on_inner(*inner_, first, last);
      chain_->after_inner(work);
      if (work) pending.push_back(std::move(work));
    }
    first = last;
  } while (first < tensors);
  return pending;
}

WorkPtr Lane::take_inner(Gather& gather, const std::string& reason) {
  TORCH_CHECK(gather.call.invalid.empty(), gather.call.invalid);
  refuse_silence(gather, reason);
  stats_.count(gather.call.operation, reason, gather.facts.output_bytes);
  if (chain_->defers()) {
    auto kept = std::make_shared<Gather>(gather);
    return chain_->defer([this, kept] { return kept->on_inner(*inner_); });
  }
  chain_->before_inner();
  WorkPtr work = gather.on_inner(*inner_);
  chain_->after_inner(work);
  return work;
}

void Lane::refuse_silence(const Gather& gather, const std::string& reason) const {
  TORCH_CHECK(!group_->settings.strict || !group_->settings.enabled, "rank ", group_->rank,
              ": PG_SDMA_STRICT=1: ", gather.call.operation, " of group ", group_->name,
              " would use the inner backend ", inner_->getBackendName(), ": ", reason);
}

void Lane::make_engine(c10::Device device) {
  if (!group_->settings.enabled) return;
  try {
    engine_ = device.is_cpu() ? host_engine()
                              : cuda_engine(device.index(), group_->settings.driver, [device] {
                                  return c10::impl::VirtualGuardImpl(device.type())
                                      .getStream(device)
                                      .native_handle();
                                });
  } catch (const std::exception& error) {
    no_engine_ = error.what();
  }
}

void Lane::vote() {
  const auto engine = [this] {
    if (!engine_) throw CannotShare(no_engine_);
    return engine_;
  };
  const auto test = [this](Transport& transport) {
    return self_test(transport, device_, group_->rank, group_->size, timeout_.load());
  };
  Rendezvous::Result result = rendezvous_.vote(engine, test, timeout_.load());
  voted_ = true;
  transport_ = std::move(result.transport);
  policy_.refusal = result.reason;
  policy_.min_bytes = group_->settings.min_bytes.value_or(0);
  if (group_->rank == 0 && log_function()) {
    const std::string how =
        transport_ ? "all-gathers read the peers' memory directly"
                   : "all-gathers use " + inner_->getBackendName() + ": " + result.reason;
    log_function()("group " + group_->name + " on " + c10::DeviceTypeName(device_, true) + ", " +
                   std::to_string(group_->size) + " ranks: " + how);
  }
}

void Lane::shutdown() {
  if (fork_guard_.forked()) return;
  chain_->stop([this] {
    if (transport_) transport_->abort("the group was destroyed with operations pending");
  });
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  closed_ = true;
  transport_.reset();
  voted_ = true;
  policy_.refusal = "the group has been destroyed";
}

void Lane::abort() {
  if (fork_guard_.forked()) return;
  if (transport_) {
    transport_->abort("rank " + std::to_string(group_->rank) + " aborted group " + group_->name);
  }
}

void Lane::check_fork() const {
  TORCH_CHECK(!fork_guard_.forked(), "rank ", group_->rank, ": group ", group_->name,
              " was made before this process was forked and cannot be used here; make a new group "
              "in the child, or start it with the spawn method");
}

}  // namespace pg_sdma
