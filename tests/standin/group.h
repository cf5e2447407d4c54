// A group of forked processes on the stand-in, and device buffers to gather between.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/device.h"
#include "standin.h"
#include "transport/setup/rendezvous.h"

namespace standin_test {

using pg_sdma::driver::Address;
using pg_sdma::driver::Stream;

// Ends the process when something is not as the test says.
#define REQUIRE(condition)                                                         \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                               \
    }                                                                              \
  } while (false)

// A store of files, as a group's vote needs it.
class FileBoard final : public pg_sdma::Board {
 public:
  explicit FileBoard(std::string folder) : folder_(std::move(folder)) {}

  void post(const std::string& key, const std::string& value) override {
    std::rename(written(key, value).c_str(), path(key).c_str());
  }

  std::string claim(const std::string& key, const std::string& value) override {
    const std::string own = written(key, value);
    (void)link(own.c_str(), path(key).c_str());  // fails where there is one
    unlink(own.c_str());
    return get({key})[0];
  }

  bool await(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    const auto end = std::chrono::steady_clock::now() + timeout;
    for (const std::string& key : keys) {
      while (access(path(key).c_str(), R_OK) != 0) {
        if (std::chrono::steady_clock::now() >= end) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    return true;
  }

  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(*peek(key));
    return values;
  }

  std::optional<std::string> peek(const std::string& key) override {
    std::ifstream file(path(key));
    if (!file) return std::nullopt;
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  }

  void remove(const std::string& key) override { unlink(path(key).c_str()); }

  int64_t count(const std::string& key) override {
    std::ofstream file(path(key), std::ios::app);
    file << "+" << std::flush;
    return file.tellp();  // an append is one step, and tells where it ended
  }

 private:
  // A file of this process's own.
  std::string written(const std::string& key, const std::string& value) const {
    const std::string own = path(key) + "." + std::to_string(getpid());
    std::ofstream(own) << value;
    return own;
  }

  std::string path(std::string key) const {
    for (char& c : key) c = c == '/' ? '-' : c;
    return folder_ + "/" + key;
  }

  std::string folder_;
};

// Device memory in one allocation, or in chunks of an expandable segment.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) { REQUIRE(cuMemAlloc_v2(&base_, bytes) == 0); }
  Buffer(size_t bytes, size_t chunk, int device) : bytes_(bytes), chunk_(chunk) {
    const size_t whole = chunks() * chunk_;
    REQUIRE(pg_sdma::driver::cuMemAddressReserve(&base_, whole, 0, 0, 0) == 0);
    for (size_t i = 0; i < chunks(); ++i) map_chunk(i, device);
  }
  ~Buffer() {
    if (chunk_ == 0) {
      REQUIRE(cuMemFree_v2(base_) == 0);
      return;
    }
    for (size_t i = 0; i < chunks(); ++i) unmap_chunk(i);
    REQUIRE(pg_sdma::driver::cuMemAddressFree(base_, chunks() * chunk_) == 0);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void map_chunk(size_t index, int device) {
    pg_sdma::driver::AllocationProperties properties;
    properties.type = pg_sdma::driver::kPinned;
    properties.handle_types = pg_sdma::driver::kPosixDescriptor;
    properties.location = {pg_sdma::driver::kOnDevice, device};
    unsigned long long handle = 0;
    REQUIRE(cuMemCreate(&handle, chunk_, &properties, 0) == 0);
    REQUIRE(pg_sdma::driver::cuMemMap(base_ + index * chunk_, chunk_, 0, handle, 0) == 0);
    REQUIRE(pg_sdma::driver::cuMemRelease(handle) == 0);
    const pg_sdma::driver::AccessDescription access{{pg_sdma::driver::kOnDevice, device},
                                                    pg_sdma::driver::kReadWrite};
    REQUIRE(pg_sdma::driver::cuMemSetAccess(base_ + index * chunk_, chunk_, &access, 1) == 0);
  }
  void unmap_chunk(size_t index) {
    REQUIRE(pg_sdma::driver::cuMemUnmap(base_ + index * chunk_, chunk_) == 0);
  }

  // The stand-in's device memory can be seen by the CPU.
  unsigned char* data() const { return reinterpret_cast<unsigned char*>(base_); }
  Address base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t chunks() const { return (bytes_ + chunk_ - 1) / chunk_; }

  size_t bytes_;
  size_t chunk_ = 0;  // 0: one allocation
  Address base_ = 0;
};

// An all-gather into `output`, one shard behind the other, with the own shard in place.
inline pg_sdma::Call gather_in_place(unsigned char* output, size_t shard, int rank, int world,
                                     std::chrono::milliseconds timeout) {
  pg_sdma::Call call;
  call.operation = "gather";
  call.dtype = "uint8";
  call.timeout = timeout;
  call.pieces.push_back({output + rank * shard, shard, {}});
  for (int r = 0; r < world; ++r) call.pieces[0].outputs.push_back(output + r * shard);
  return call;
}

// Whether something comes true within five seconds.
inline bool soon(const std::function<bool()>& condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// Runs `body(rank)` in a process of its own for each rank; 1 when any of them fails. `forked` runs
// here once all have been started.
inline int run_ranks(
    int world, const std::function<void(int)>& body, const std::function<void()>& forked = [] {}) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      alarm(120);
      try {
        body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::_Exit(1);
      }
      std::_Exit(0);
    }
    children.push_back(child);
  }
  forked();
  int result = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) result = 1;
  }
  return result;
}

// "The caller's current stream".
inline Stream caller = nullptr;

inline bool by_hip(const std::string& driver) { return driver.rfind("hip:", 0) == 0; }

// The engine of a device. `driver`: the library's path, behind "hip:" where it is asked for HIP's
// names.
inline std::shared_ptr<pg_sdma::Engine> engine_by(const std::string& driver, int device) {
  const bool hip = by_hip(driver);
  return pg_sdma::device_engine(
      hip ? pg_sdma::driver::Vendor::kHip : pg_sdma::driver::Vendor::kCuda, device,
      hip ? driver.substr(4) : driver, [] { return caller; });
}

// Makes the device's context current, with a caller's stream on it.
inline void enter(int device) {
  pg_sdma::driver::Context context = nullptr;
  REQUIRE(pg_sdma::driver::cuDevicePrimaryCtxRetain(&context, device) == 0);
  REQUIRE(pg_sdma::driver::cuCtxPushCurrent_v2(context) == 0);
  REQUIRE(pg_sdma::driver::cuStreamCreateWithPriority(&caller, pg_sdma::driver::kNonBlocking, 0) ==
          0);
}

// The transport of this rank, on device `rank`, once all ranks have voted; its hardware queues are
// then shared as `queues` says (standin_share_queues). `defer`, `tickets`: Rendezvous::Options.
inline std::unique_ptr<pg_sdma::DirectTransport> join(
    const std::string& driver, const std::string& folder, int rank, int world,
    std::optional<std::chrono::microseconds> patience, int queues = 0, bool defer = false,
    uint64_t tickets = pg_sdma::Rendezvous::Options().tickets) {
  pg_sdma::Rendezvous::Options options;
  options.tickets = tickets;
  options.group = "group";
  options.lane = "cuda";
  options.rank = rank;
  options.world = world;
  options.patience = patience;
  options.defer = defer;
  pg_sdma::Rendezvous rendezvous(options, std::make_shared<FileBoard>(folder));
  rendezvous.join();
  const auto engine = [&] {
    auto made = engine_by(driver, rank);
    // Only now: a device whose streams share one queue is refused.
    standin_share_queues(queues);
    return made;
  };
  const auto no_test = [](pg_sdma::DirectTransport&) { return pg_sdma::TestResult(); };
  auto result = rendezvous.vote(engine, no_test, std::chrono::minutes(1));
  if (!result.transport) throw std::runtime_error("the vote says: " + result.reason);
  enter(rank);
  return std::move(result.transport);
}

// What the caller's stream can be made to wait for.
class Gate {
 public:
  explicit Gate(pg_sdma::Engine& engine) : queue_(engine.queue(page_, 4096)) {}
  ~Gate() { queue_.reset(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  // What is enqueued from here on waits for open(), or until as many as this are opened.
  void close() {
    class NoWaiter final : public pg_sdma::Waiter {
      void wait(pg_sdma::Counter&, uint64_t) override {}
      void wrote() override {}
    } waiter;
    queue_->run({pg_sdma::Step::wait(*counter(), ++closed_)}, waiter);
    queue_->caller_follows();
  }
  void open() { open(closed_); }
  void open(uint64_t first) { counter()->store(first); }

 private:
  pg_sdma::Counter* counter() { return static_cast<pg_sdma::Counter*>(page_); }

  void* page_ = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  std::unique_ptr<pg_sdma::Queue> queue_;
  uint64_t closed_ = 0;
};

}  // namespace standin_test
