// The self-test's memory on the stand-in.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "group.h"
#include "transport/setup/self_test.h"

namespace standin_test {

class BufferMemory final : public pg_sdma::TestMemory {
 public:
  ~BufferMemory() override {
    if (kept_) new std::deque<std::unique_ptr<Buffer>>(std::move(buffers_));
  }
  char* allocate(size_t bytes) override {
    buffers_.push_back(std::make_unique<Buffer>(bytes));
    return reinterpret_cast<char*>(buffers_.back()->data());
  }
  void put(char* to, const std::vector<unsigned char>& bytes) override {
    REQUIRE(cuStreamSynchronize(caller) == 0);
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<unsigned char*>(to));
  }
  std::vector<unsigned char> get(const char* from, size_t bytes) override {
    REQUIRE(cuStreamSynchronize(caller) == 0);
    const auto* first = reinterpret_cast<const unsigned char*>(from);
    return {first, first + bytes};
  }
  void keep() override { kept_ = true; }

 private:
  bool kept_ = false;
  std::deque<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace standin_test
