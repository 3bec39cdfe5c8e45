// Checks of a table of modes for the C APIs of INT8 layers.
#pragma once

#include <cmath>

#include "common/report.h"
#include "trtconvert/layer_modes.h"

namespace trtconvert {

constexpr int kMostBins = 65536;
constexpr int kMostSamples = 65536;

inline bool has_mode(int32_t mode_set, TrtConvertLayerMode mode) { return mode_set & TRTCONVERT_MODE_BIT(mode); }
inline bool has_one_mode(int32_t mode_set) { return (mode_set & (mode_set - 1)) == 0; }

inline TrtConvertStatus check_mode_set(int32_t mode_set, Report& report) {
  if (mode_set > 0 && !(mode_set & ~TRTCONVERT_ALL_MODES)) return TRTCONVERT_OK;
  return report.invalid_int("mode_set", "a sum of 2 (weights only), 4 (dynamic) and 8 (static)", mode_set);
}

// Samples with equal numbers of rows.
inline TrtConvertStatus check_samples(int32_t batch, int64_t rows, Report& report) {
  if (batch < 1 || batch > kMostSamples) return report.invalid_int("batch", "1..65536", batch);
  if (rows % batch == 0) return TRTCONVERT_OK;
  return report.fail(TRTCONVERT_INVALID_ARGUMENT, "rows: expected as many of each of %d samples, got %lld in all", batch,
                     static_cast<long long>(rows));
}

// Checks that need no memory.
inline TrtConvertStatus check_table(const TrtConvertModeTable& t, int64_t rows, Report& report) {
  if (check_mode_set(t.mode_set, report)) return report.status;
  if (t.num_bins < 1 || t.num_bins > kMostBins) return report.invalid_int("num_bins", "1..65536", t.num_bins);
  if (check_samples(t.batch, rows, report)) return report.status;
  if (!std::isfinite(t.timestep_max) || t.timestep_max <= 0)
    return report.fail(TRTCONVERT_INVALID_ARGUMENT,
                       "timestep_max: expected the positive finite timestep at which the schedule ends (diffusers: 1000), got %g",
                       t.timestep_max);
  return TRTCONVERT_OK;
}

inline TrtConvertStatus check_table_tensors(const TrtConvertModeTable& t, Report& report) {
  if ((t.timestep || t.num_bins > 1) && report.check_pointer("timestep", t.timestep, alignof(float))) return report.status;
  if ((t.modes || !has_one_mode(t.mode_set)) && report.check_pointer("modes", t.modes, alignof(int32_t))) return report.status;
  if (has_mode(t.mode_set, TRTCONVERT_STATIC)) return report.check_pointer("x_scale", t.x_scale, alignof(float));
  return TRTCONVERT_OK;
}

}  // namespace trtconvert
