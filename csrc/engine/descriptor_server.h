// File descriptors from one process to another of the same user: a thread that answers requests on
// an abstract Unix socket, and the client's side.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace pg_sdma {

// An open file descriptor that is closed with the object, and how many bytes it stands for.
class Descriptor {
 public:
  explicit Descriptor(int number, uint64_t bytes = 0) : number_(number), bytes_(bytes) {}
  Descriptor(Descriptor&& other) noexcept
      : number_(std::exchange(other.number_, -1)), bytes_(other.bytes_) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor();

  int number() const { return number_; }
  uint64_t bytes() const { return bytes_; }

 private:
  int number_;
  uint64_t bytes_;
};

class DescriptorServer {
 public:
  // Gives descriptors [first, first + count) of an export. Throws std::exception with the reason.
  using Source =
      std::function<std::vector<Descriptor>(uint64_t export_id, size_t first, size_t count)>;

  // Listens at `name` at once. Throws std::system_error.
  DescriptorServer(const std::string& name, Source source);
  DescriptorServer(const DescriptorServer&) = delete;
  DescriptorServer& operator=(const DescriptorServer&) = delete;
  ~DescriptorServer();

 private:
  void serve();
  void answer(int connection);

  Source source_;
  pid_t process_;
  Descriptor listener_;
  Descriptor stop_;
  std::thread thread_;
};

// Hands all `count` descriptors of an export, in order, to `take`, which may keep none: they come
// from the server `name`, which must belong to `process`. Throws std::runtime_error with the
// reason, the server's own included.
void fetch_descriptors(const std::string& name, pid_t process, uint64_t export_id, size_t count,
                       const std::function<void(const Descriptor&)>& take);

}  // namespace pg_sdma
