# SPDX-License-Identifier: Apache-2.0
# An AMI with the daemon enabled.

source "amazon-ebs" "swansong" {
  region        = var.aws_region
  subnet_id     = var.aws_subnet
  instance_type = var.aws_instance_type
  ami_name      = "${var.image_name}-${local.stamp}"

  source_ami_filter {
    filters = {
      name                = var.aws_source_image
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
    owners      = [var.aws_source_owner]
    most_recent = true
  }

  # A Debian image has 8 GB; base images with GPU drivers have the size that they need.
  dynamic "launch_block_device_mappings" {
    for_each = var.aws_disk_gb > 0 ? [var.aws_disk_gb] : []
    content {
      device_name           = var.aws_root_device
      volume_size           = launch_block_device_mappings.value
      volume_type           = "gp2"
      delete_on_termination = true
    }
  }

  encrypt_boot = var.aws_encrypt
  kms_key_id   = var.aws_kms_key

  # Version 2 of the metadata service, for VMs of the image and for the build VM.
  # Packer 1.6 knows neither setting: remove the four lines for it.
  imds_support = "v2.0"
  metadata_options {
    http_tokens = "required"
  }

  ssh_username              = var.aws_ssh_username
  ssh_clear_authorized_keys = true

  tags = {
    Name = "${var.image_name}-${local.stamp}"
  }
}
