// Messages to the logger of the TensorRT that loaded this library.
#pragma once

#include "tensorrt/abi.h"

namespace trtconvert::plugin {

using abi::Severity;

// Stores TensorRT's logger finder. `finder` is an ILoggerFinder of the calling TensorRT.
void set_logger_finder(void* finder) noexcept;

// Formats like printf (up to 1 KiB) and logs with the library's name in front. Without a logger, errors go to stderr.
[[gnu::format(printf, 2, 3)]] void log(Severity severity, char const* format, ...) noexcept;

}  // namespace trtconvert::plugin
