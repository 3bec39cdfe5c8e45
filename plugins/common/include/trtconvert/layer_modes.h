/* Modes of INT8 layers in a timestep bin, and the rows between such layers, quantised or not. */
#ifndef TRTCONVERT_LAYER_MODES_H_
#define TRTCONVERT_LAYER_MODES_H_

#include <stdint.h>

/* All modes have the same INT8 weights with a scale per output channel. */
typedef enum {
  TRTCONVERT_WEIGHT_ONLY = 1, /* activations stay in 16 bits */
  TRTCONVERT_DYNAMIC = 2,     /* INT8 activations, a scale per row from its data */
  TRTCONVERT_STATIC = 3,      /* INT8 activations, the calibrated scale of the timestep bin */
} TrtConvertLayerMode;

/* Bits of a set of modes. */
#define TRTCONVERT_MODE_BIT(mode) (1 << (mode))
#define TRTCONVERT_ALL_MODES 14

/* The mode of a call is the smallest, most careful, of those that its samples' timesteps select:
 * bin = clamp(floor(timestep[b] * T / timestep_max), 0, T - 1) in FP32; 0 for a NaN.
 *
 * A sample with a NaN timestep has rows with the scale NaN, and NaN results. So have all samples if the mode is not in mode_set, and
 * in mode STATIC the samples whose scale is not positive and finite. */
typedef struct {
  int32_t mode_set;      /* bits of the modes that occur in the table, at least one */
  int32_t num_bins;      /* T: 1..65536 */
  int32_t batch;         /* samples, each with as many rows, one sample behind the other: 1..65536, a divisor of the rows */
  float timestep_max;    /* finite, > 0 */

  /* On the device, contiguous. */
  const float* timestep; /* [batch]; null, with one bin only: none is NaN */
  const int32_t* modes;  /* [T] TrtConvertLayerMode; null where mode_set has one mode */
  const float* x_scale;  /* [T]: largest magnitude / 127; null unless mode_set has STATIC */
} TrtConvertModeTable;

/* Quantised rows between two layers: a payload of one buffer, and a scale for each row.
 *
 *   modes DYNAMIC, STATIC   row m is INT8 [K] at byte m * K; scale[m] > 0, and x = scale[m] * payload[m]
 *   mode WEIGHT_ONLY        row m is 16-bit [K] at byte 2 * m * K; scale[m] = -1
 *
 * The sign bit of scale[0], which a NaN has too, says which of both a payload is, so readers need no table. Buffers have the size of
 * the second if mode_set has WEIGHT_ONLY. */

/* Bytes of an image that say whether the previous layer found NaN or infinity in it: all are 0, or the image is NaN. INT8 has no code
 * for NaN. The kernel that quantises an image writes all of its marks. */
#define TRTCONVERT_IMAGE_MARKS 32

#endif /* TRTCONVERT_LAYER_MODES_H_ */
