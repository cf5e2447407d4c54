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

// A physical chunk of memory as its owner has it mapped.
struct Chunk {
  uint64_t serial = 0;  // its owner's number for it, never given to another; 0: it is gone
  uint64_t address = 0;
  uint64_t bytes = 0;
};

// The addresses that an export's chunks lie among, in which they adjoin.
struct Segment {
  uint64_t base = 0;
  uint64_t bytes = 0;
};

class DescriptorServer {
 public:
  // What is served. Either function throws std::exception with the reason why not.
  struct Source {
    // Chunks [first, first + count) of an export, and where the export lies.
    std::function<std::vector<Chunk>(uint64_t export_id, size_t first, size_t count, Segment&)>
        chunks;
    // Descriptors of some of its chunks.
    std::function<std::vector<Descriptor>(uint64_t export_id, const std::vector<uint64_t>& serials)>
        descriptors;
  };

  // Listens at `name` at once. Throws std::system_error.
  DescriptorServer(const std::string& name, Source source);
  DescriptorServer(const DescriptorServer&) = delete;
  DescriptorServer& operator=(const DescriptorServer&) = delete;
  ~DescriptorServer();

 private:
  void serve();
  bool answered(int connection);
  bool answer(int connection);

  Source source_;
  pid_t process_;
  Descriptor listener_;
  Descriptor stop_;
  std::thread thread_;
};

// A connection to the server `name`, which must belong to `process`. What goes wrong, on either
// side, is thrown as std::runtime_error with the reason.
class DescriptorClient {
 public:
  DescriptorClient(const std::string& name, pid_t process);

  // All `count` chunks of an export.
  std::vector<Chunk> chunks(uint64_t export_id, size_t count, Segment& segment);
  // Hands the descriptors of some of its chunks, in order, to `take`, which may keep none.
  void fetch(uint64_t export_id, const std::vector<uint64_t>& serials,
             const std::function<void(const Descriptor&)>& take);

 private:
  const Descriptor connection_;
};

}  // namespace pg_sdma
