#include "backend/setup/group_setup.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "backend/setup/self_test.h"
#include "backend/setup/store_board.h"
#include "engine/device.h"
#include "engine/host.h"

namespace pg_sdma {
namespace {

Log& log_function() {
  // Never destroyed: a static destructor would drop a Python reference after Python has ended.
  static auto* function = new Log();
  return *function;
}

Mori& mori_offers() {
  static auto* offers = new Mori();  // as above
  return *offers;
}

bool among(const std::vector<c10::DeviceType>& devices, c10::DeviceType device) {
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

TunedBounds tuned_bounds(const Settings& settings, c10::DeviceType device) {
  const auto found = settings.tuned.find(device);
  return settings.min_bytes || found == settings.tuned.end() ? TunedBounds{} : found->second;
}

// What may go direct; empty when nothing may.
std::string operations(const Settings& settings, bool no_sums) {
  std::string names = settings.all_gathers ? "all-gathers" : "";
  if (!settings.reduce_scatters || no_sums) return names;
  return names + (names.empty() ? "" : " and ") + "reduce-scatters";
}

}  // namespace

void set_log(Log log) { log_function() = std::move(log); }

void set_mori(Mori mori) { mori_offers() = std::move(mori); }

GroupSetup::GroupSetup(std::shared_ptr<const Group> group, c10::DeviceType device,
                       std::string inner, Hooks hooks)
    : group_(std::move(group)),
      device_(device),
      inner_(std::move(inner)),
      hooks_(std::move(hooks)),
      rendezvous_(vote_options(), std::make_shared<StoreBoard>(group_->store, hooks_.fault)) {
  rendezvous_.join();
}

void GroupSetup::close(const std::string& reason) {
  voted_ = true;
  policy_.refusal = reason;
}

Rendezvous::Options GroupSetup::vote_options() {
  const Settings& settings = group_->settings;
  Rendezvous::Options options;
  options.group = group_->name;
  options.lane = c10::DeviceTypeName(device_, /*lower_case=*/true);
  options.rank = group_->rank;
  options.world = group_->size;
  options.enabled = settings.enabled;
  options.settings = settings.agreed + tuned_bounds(settings, device_).text;
  options.ring = settings.ring;
  options.slots = settings.slots;
  options.defer = settings.defer;
  // One rank alone has nobody to ask, and copies.
  options.peer_copies = group_->size == 1 || among(settings.peer_copies_on, device_);
  options.no_offer = settings.no_mori;
  options.let_peers_read = settings.let_peers_read;
  if (settings.patience_ms) {
    options.patience =
        std::chrono::microseconds(static_cast<int64_t>(1000 * *settings.patience_ms));
  }
  options.allow_same_device = settings.allow_same_device;
  options.allow_pcie = settings.allow_pcie;
  if (settings.reduce_scatters && device_ != c10::kCPU) {
    options.no_sums = settings.no_device_sums;
  }
  options.on_fault = [this](const std::string& why) {
    // The vote's own test may fail without harm: the group then uses the inner.
    if (live_) hooks_.on_fault(why);
  };
  if (among(settings.mori_on, device_)) options.offer = [this] { return offer_mori(); };
  return options;
}

void GroupSetup::make_engine(c10::Device device) {
  if (engine_ || voted_) return;
  engine_device_ = device;
  if (!group_->settings.enabled) return;
  const auto current_stream = [device] {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  };
  const auto vendor = group_->settings.hip ? driver::Vendor::kHip : driver::Vendor::kCuda;
  try {
    engine_ = device.is_cpu()
                  ? host_engine()
                  : device_engine(vendor, device.index(), group_->settings.driver, current_stream);
  } catch (const std::exception& error) {
    no_engine_ = error.what();
  }
}

GroupSetup::Outcome GroupSetup::vote(std::chrono::milliseconds timeout) {
  const auto engine = [this] {
    if (!engine_) throw CannotShare(no_engine_);
    return engine_;
  };
  const auto deadline = Clock::now() + timeout;
  // To the end of the vote: a peer that is slower still opens it, and what it would find instead is
  // not the reason.
  const std::unique_ptr<TestMemory> memory = test_memory(*engine_device_);
  const auto test = [this, &memory, deadline](DirectTransport& transport) {
    return self_test(transport, *memory, *engine_, group_->rank, group_->size, deadline);
  };
  Rendezvous::Result result;
  try {
    result = rendezvous_.vote(engine, test, timeout);
  } catch (const std::exception& error) {
    // Sticky: peers may have voted on what this rank has said so far.
    std::string why = error.what();
    if (dynamic_cast<const c10::Error*>(&error) != nullptr) {
      why = "rank " + std::to_string(group_->rank) + ": the first direct operation of group " +
            group_->name + " cannot use the group's store, look at the process that serves it: " +
            why.substr(0, why.find('\n'));
    }
    throw GroupFault(why);
  }
  if (const std::string why = hooks_.fault(); !why.empty()) throw GroupFault(why);
  settle(result);
  const std::string way = result.transport ? result.transport->way() : "inner: " + result.reason;
  return {std::move(result.transport), way};
}

void GroupSetup::settle(const Rendezvous::Result& result) {
  voted_ = true;
  live_ = true;
  off_everywhere_ = result.off_everywhere;
  policy_.refusal = result.reason;
  policy_.no_sums = result.no_sums;
  const auto& least = group_->settings.min_bytes;
  const TunedBounds tuned = tuned_bounds(group_->settings, device_);
  const uint64_t untuned = engine_ ? engine_->least_bytes() : 0;
  const uint64_t untuned_sum = engine_ ? engine_->least_sum_bytes() : 0;
  policy_.min_bytes = least.value_or(tuned.min_bytes.value_or(untuned));
  policy_.min_sum_bytes = least.value_or(tuned.min_sum_bytes.value_or(untuned_sum));
  ready_from_ =
      result.reason.empty() && result.no_sums.empty() ? policy_.min_sum_bytes : UINT64_MAX;
  // A copy for each tensor, where the inner has one kernel for all.
  policy_.min_mean_bytes = least ? 0 : tuned.min_mean_bytes.value_or(untuned);
  const std::string which = operations(group_->settings, !result.no_sums.empty());
  if (group_->rank == 0 && log_function() && !which.empty()) {
    log_function()(announcement(result, which), result.settings_differ ? result.reason : "");
  }
}

std::shared_ptr<ExternalOffer> GroupSetup::offer_mori() const {
  if (!mori_offers()) throw CannotShare("nobody to ask for mori");
  return mori_offers()(*group_, *engine_device_);
}

std::string GroupSetup::announcement(const Rendezvous::Result& result,
                                     const std::string& which) const {
  std::string how = " use " + inner_ + ": " + result.reason;
  if (result.transport) {
    const std::string way = result.transport->way();
    how = way == "pull"    ? " read the peers' memory directly"
          : way == "push"  ? " write the peers' memory directly"
          : way == "slots" ? " go through shared memory or read the peers' memory directly"
                           : " go by " + way;
    if (!result.no_peer_copies.empty()) {
      how += ", because copies between the ranks are refused: " + result.no_peer_copies;
    }
  }
  return "group " + group_->name + " on " + c10::DeviceTypeName(device_, true) + ", " +
         std::to_string(group_->size) + " ranks: " + which + how;
}

}  // namespace pg_sdma
