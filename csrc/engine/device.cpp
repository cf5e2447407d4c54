#include "engine/device.h"

#include <sys/random.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "engine/descriptor_server.h"
#include "engine/driver.h"
#include "engine/driver_device.h"
#include "engine/driver_manners.h"
#include "engine/exports.h"
#include "engine/imports.h"
#include "engine/probe.h"
#include "engine/stream_queue.h"

namespace pg_sdma {
namespace {

std::string hex(const driver::Uuid& uuid) {
  std::string text;
  for (const unsigned char byte : uuid) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

driver::Uuid uuid_of(const driver::Library& library, int ordinal) {
  driver::Uuid uuid{};
  library.must(library.device_uuid, &uuid, ordinal);
  return uuid;
}

// Not to be guessed: abstract socket names are open to every process of the host.
std::string new_socket_name() {
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random) {
    throw CannotShare("the kernel gave no random number");
  }
  char name[64];
  std::snprintf(name, sizeof name, "pg_sdma-%d-%016llx", getpid(),
                static_cast<unsigned long long>(random));
  return name;
}

// What a peer's engine says of itself: "<device uuid> <process> <socket>".
struct Identity {
  std::string uuid;
  Owner owner;

  std::string text() const {
    return uuid + " " + std::to_string(owner.process) + " " + owner.socket;
  }
  static Identity parse(const std::string& text) {
    Identity identity;
    std::istringstream words(text);
    if (!(words >> identity.uuid >> identity.owner.process >> identity.owner.socket)) {
      throw CannotShare("a peer's engine is not a GPU's: " + text);
    }
    return identity;
  }
};

// Below it NCCL's kernel takes less of the device's time than the two waits of a gather, and its
// host waits for nobody (docs/results.md).
constexpr uint64_t kLeastBytes = uint64_t{4} << 20;
constexpr uint64_t kLeastSumBytes = uint64_t{64} << 20;

class DeviceEngine final : public Engine {
 public:
  explicit DeviceEngine(std::shared_ptr<const DriverDevice> device)
      : device_(std::move(device)),
        exports_(*device_->library, device_->ordinal),
        imports_(*device_->library, device_->ordinal) {
    identity_.uuid = hex(uuid_of(*device_->library, device_->ordinal));
    identity_.owner = {getpid(), new_socket_name()};
  }

  std::string name() const override {
    return device_->library->vendor == driver::Vendor::kHip ? "hip" : "cuda";
  }
  bool stream_ordered() const override { return true; }
  bool pushes() const override { return true; }
  uint64_t least_bytes() const override { return kLeastBytes; }
  uint64_t least_sum_bytes() const override { return kLeastSumBytes; }
  bool opens_exports() const override { return true; }
  bool shares_hardware_queues() const override {
    return driver::shares_hardware_queues(device_->library->vendor);
  }
  Doubts doubts() const override { return driver::doubts(device_->library->vendor); }
  std::string identity() const override { return identity_.text(); }

  Place publish(const void* data, size_t bytes) override {
    const auto current = device_->enter();
    return exports_.publish(data, bytes);
  }

  Ticket ticket(uint64_t export_id) override {
    const Ticket ticket = exports_.ticket(export_id);
    try {
      if (ticket.descriptors > 0) std::call_once(serving_, [this] { start_server(); });
    } catch (...) {
      exports_.give_up(export_id);
      throw;
    }
    return ticket;
  }
  void give_up(uint64_t export_id) override { exports_.give_up(export_id); }

  bool live(uint64_t export_id) override {
    const auto current = device_->enter();
    return exports_.live(export_id);
  }

  Mapping open(const std::string& identity, const Ticket& ticket) override {
    const auto current = device_->enter();
    const driver::RelaxedCapture relaxed(*device_->library);
    return imports_.open(Identity::parse(identity).owner, ticket);
  }

  void close(const Mapping& mapping) override {
    const auto current = device_->enter();
    const driver::RelaxedCapture relaxed(*device_->library);
    imports_.close(mapping);
  }

  bool closing_waits(const Mapping& mapping) const override { return !imports_.in_chunks(mapping); }

  Link link_to(const std::string& identity) const override {
    const std::string uuid = Identity::parse(identity).uuid;
    if (uuid == identity_.uuid) return Link::kSameDevice;
    const driver::Library& library = *device_->library;
    int count = 0;
    library.must(library.device_count, &count);
    for (int peer = 0; peer < count; ++peer) {
      if (hex(uuid_of(library, peer)) == uuid) {
        return driver::link_between(library, device_->ordinal, peer);
      }
    }
    return Link::kNone;  // the visible devices leave it out, and then it cannot be opened either
  }

  bool capturing() const override {
    return device_->records(device_->current_stream(), /*unasked=*/true);
  }

  std::unique_ptr<Queue> queue(void* page, size_t bytes) override {
    return std::make_unique<StreamQueue>(device_, page, bytes);
  }

 private:
  void start_server() {
    DescriptorServer::Source source;
    source.chunks = [this](uint64_t export_id, size_t first, size_t count, Segment& segment) {
      const auto current = device_->enter();
      return exports_.chunks(export_id, first, count, segment);
    };
    source.descriptors = [this](uint64_t export_id, const std::vector<uint64_t>& serials) {
      const auto current = device_->enter();
      const driver::RelaxedCapture relaxed(*device_->library);
      return exports_.descriptors(export_id, serials);
    };
    server_ = std::make_unique<DescriptorServer>(identity_.owner.socket, std::move(source));
  }

  std::shared_ptr<const DriverDevice> device_;
  Identity identity_;
  Exports exports_;
  Imports imports_;
  std::once_flag serving_;
  std::unique_ptr<DescriptorServer> server_;  // last, so that its thread ends first
};

std::shared_ptr<DriverDevice> open_device(driver::Vendor vendor, int ordinal,
                                          const std::string& library,
                                          std::function<void*()> current_stream) {
  auto device = std::make_shared<DriverDevice>();
  device->library = driver::Library::open(vendor, library);
  device->ordinal = ordinal;
  device->current_stream = std::move(current_stream);
  device->copy_streams = driver::copy_streams(vendor);
  driver::check_device(*device->library, ordinal);
  driver::open_device(*device);
  return device;
}

}  // namespace

std::shared_ptr<Engine> device_engine(driver::Vendor vendor, int ordinal,
                                      const std::string& library,
                                      std::function<void*()> current_stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, std::string>, std::weak_ptr<Engine>> engines;
  std::lock_guard<std::mutex> lock(mutex);
  auto& known = engines[{ordinal, library}];
  if (std::shared_ptr<Engine> engine = known.lock()) return engine;
  try {
    const auto device = open_device(vendor, ordinal, library, std::move(current_stream));
    const auto current = device->enter();
    probe_streams(*device);
    auto engine = std::make_shared<DeviceEngine>(device);
    known = engine;
    return engine;
  } catch (const std::runtime_error& error) {
    throw CannotShare(std::string(driver::vendor_name(vendor)) + " device " +
                      std::to_string(ordinal) + ": " + error.what());
  }
}

}  // namespace pg_sdma
