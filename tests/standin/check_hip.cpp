// What the engine does on HIP alone. Run with "hip:" in front of the library.
#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "checks.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

class NoWaiter final : public Waiter {
  void wait(Counter&, uint64_t) override {}
  void wrote() override {}
};

CHECK(hip_mapped_memory_is_not_shared_nor_asked_for_a_handle) {
  const auto engine = engine_on(0);
  constexpr size_t kChunk = size_t{1} << 16;
  const Buffer segment(2 * kChunk, kChunk, 0);
  const std::string why = refusal([&] { engine->publish(segment.data(), 8); });
  REQUIRE(has(why, "without a handle"));
  REQUIRE(standin_calls("hipIpcGetMemHandle") == 0);
}

// HIP's attribute has 32 bits for the size.
CHECK(hip_large_allocations_are_exported_whole) {
  const auto engine = engine_on(0);
  constexpr size_t kBytes = size_t{5} << 30;
  const Buffer buffer(kBytes);
  const Place place = engine->publish(buffer.data() + (kBytes - 100), 100);
  REQUIRE(place.offset == kBytes - 100 && engine->ticket(place.export_id).bytes == kBytes);
}

CHECK(hip_threads_keep_the_device_they_had) {
  const auto engine = engine_on(1);
  const Buffer buffer(4096);
  std::thread([&] {
    REQUIRE(engine->publish(buffer.data(), 8).export_id == 1);
    int device = -1;
    REQUIRE(driver::hipGetDevice(&device) == 0 && device == 0);
  }).join();
}

CHECK(hip_access_to_every_peer_is_enabled_once) {
  const auto first = engine_on(0);
  REQUIRE(standin_calls("hipDeviceEnablePeerAccess") == 3);
  REQUIRE(driver::hipDeviceEnablePeerAccess(1, 0) == driver::kPeerAccessAlreadyEnabled);
}

// As torch's wheels bring it: under a version's name, where nobody else would look.
CHECK(hip_the_library_that_is_loaded_is_the_one_that_is_used) {
  namespace fs = std::filesystem;
  char folder[] = "/tmp/pg_sdma_hip_XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  const fs::path library = fs::path(folder) / "libamdhip64.so.7";
  fs::copy_file(driver_path.substr(4), library);
  REQUIRE(has(refusal([] { device_engine(driver::Vendor::kHip, 0, "", [] { return caller; }); }),
              "libamdhip64.so"));
  REQUIRE(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr);
  REQUIRE(device_engine(driver::Vendor::kHip, 0, "", [] { return caller; })->name() == "hip");
  fs::remove_all(folder);
}

CHECK(hip_tracks_run_side_by_side_between_the_steps_around_them) {
  const auto engine = engine_on(0);
  standin_share_queues(0);
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* counters = static_cast<Counter*>(page);
  const auto queue = engine->queue(page, 4096);
  const Buffer source(64), first(64), second(64);
  std::memset(source.data(), 9, 64);
  std::memset(first.data(), 1, 64);
  std::memset(second.data(), 1, 64);
  NoWaiter waiter;
  queue->run(
      {Step::wait(counters[0], 1), Step::wait(counters[1], 1).on(1),
       Step::copy(first.data(), 0, source.base(), 64).on(1), Step::write(counters[5], 1).on(1),
       Step::wait(counters[2], 1).on(2), Step::copy(second.data(), 0, source.base(), 64).on(2),
       Step::write(counters[4], 1).on(2), Step::write(counters[3], 1)},
      waiter);
  const auto end = queue->mark();
  counters[2] = 1;
  REQUIRE(counters[4] == 0);  // nothing before the step in front of the tracks
  counters[0] = 1;
  REQUIRE(soon([&] { return counters[4] == 1; }));  // the second does not wait for the first
  REQUIRE(counters[5] == 0 && counters[3] == 0 && !end->passed());
  counters[1] = 1;
  REQUIRE(soon([&] { return end->passed(); }));
  REQUIRE(counters[5] == 1 && counters[3] == 1);
  REQUIRE(first.data()[63] == 9 && second.data()[63] == 9);
}

}  // namespace
