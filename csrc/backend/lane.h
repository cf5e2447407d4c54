// A lane is one device type's half of a group: its inner backend, its transport, and the chain that
// keeps the collectives of both in issue order.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <utility>

namespace pg_sdma {

class Lane {
 public:
  explicit Lane(c10::intrusive_ptr<c10d::Backend> inner) : inner_(std::move(inner)) {}

  c10d::Backend& inner() { return *inner_; }

  // Issues one collective on the inner, in chain order. Returns what the inner returns (null for
  // NCCL's synchronous operations).
  template <class Method, class... Args>
  c10::intrusive_ptr<c10d::Work> issue(Method method, Args&... args) {
    return ((*inner_).*method)(args...);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
};

}  // namespace pg_sdma
