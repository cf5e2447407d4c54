// Whether what we declare of a function passes its arguments as the vendor's declaration does.
#pragma once

#include <type_traits>

#include "engine/driver.h"

// HIP's addresses of device memory are pointers; ours are numbers of that size, as CUDA's are.
template <class Theirs, class Ours>
constexpr bool same_argument() {
  if constexpr (std::is_pointer_v<Theirs> && std::is_same_v<Ours, pg_sdma::driver::Address>) {
    return sizeof(Theirs) == sizeof(Ours);
  } else if constexpr (std::is_pointer_v<Theirs> || std::is_pointer_v<Ours>) {
    return std::is_pointer_v<Theirs> && std::is_pointer_v<Ours>;
  } else if constexpr (std::is_class_v<Theirs> || std::is_class_v<Ours>) {
    return std::is_class_v<Theirs> && std::is_class_v<Ours> && sizeof(Theirs) == sizeof(Ours);
  } else {
    return sizeof(Theirs) == sizeof(Ours);
  }
}

template <class Result, class... Theirs, class... Ours>
constexpr bool same_call(Result (*)(Theirs...),
                         pg_sdma::driver::Call<Ours...> pg_sdma::driver::Library::*) {
  static_assert(sizeof(Result) == sizeof(int));
  if constexpr (sizeof...(Theirs) != sizeof...(Ours)) {
    return false;
  } else {
    return (same_argument<Theirs, Ours>() && ...);
  }
}
